// The order in which the ranks launch operations on devices.
//
// A kernel that moves data between devices waits for the same kernel on the others. Ranks that launch two of them in
// different orders wait for ever, also when these belong to different groups. So each operation gets a ticket of the
// generation once all its ranks have come, and each rank launches its operations in the order of tickets.
//
// On one host the rank that releases the gate takes the ticket first. Between hosts each leader proposes a number when
// all hosts have agreed on the operation, and the greatest one counts (Skeen's algorithm; Birman and Joseph 1987). No
// rank waits for an operation that another has yet to call: its ticket comes later than those already taken.
#pragma once

#include <cstdint>

#include "ring/group/block.hpp"

namespace ring {

struct Ticket {
    enum class State {
        Later,     // will be greater than any that is taken now
        Soon,      // is being taken
        Proposed,  // will be `number` or greater
        Taken,
    };
    State state = State::Later;
    std::uint64_t number = 0;
};

// The tickets of one group on one host.
class Tickets {
   public:
    // The numbers come from the block of the generation, which all its groups on this host share.
    Tickets(GroupBlock& block, GroupBlock& generation) : block_(block), generation_(generation) {}

    // The group spans hosts.
    void decide_between_hosts() { between_hosts_ = true; }
    // Called by the rank that releases a gate of an operation on devices, before the release.
    void take();
    // Called by the leader of a host, in this order, when all hosts have agreed on the operation.
    std::uint64_t propose();
    void decide(std::uint64_t number);

    // The ticket of the operation whose ranks meet at `gate`.
    Ticket look(std::uint64_t gate) const;
    // Makes later tickets greater than this one, which another host may have given.
    void pass(std::uint64_t number);

   private:
    GroupBlock& block_;
    GroupBlock& generation_;
    bool between_hosts_ = false;
};

}  // namespace ring
