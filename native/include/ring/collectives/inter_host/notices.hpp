// How an abort or a departure reaches the other hosts of a group, where the link still works.
//
// Nothing here waits. A notice that is due is sent, and one that is on its way is read, by the rank that looks
// next: every rank that waits looks every 50 ms.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "ring/group/host_group.hpp"
#include "ring/transport/link.hpp"

namespace ring {

class Fabric;

class Notices {
   public:
    explicit Notices(const Fabric& fabric);
    // Gives notices a moment to be sent; the link keeps those that nobody has taken by then.
    ~Notices();
    Notices(const Notices&) = delete;
    Notices& operator=(const Notices&) = delete;

    // The first of each is sent; where there is no memory for that now, later.
    void announce_abort(std::string_view reason) noexcept;
    // By the last rank of a host that leaves, for collectives; and by every one, for those that wait for its messages.
    void announce_departure(std::uint64_t last_sequence) noexcept;
    void announce_leaving() noexcept;
    // Sends what is due.
    void send_due() noexcept;
    // Reads what has arrived: aborts the group, or remembers that a host has left. False when a notice is on its way
    // whose sender has yet to deliver the rest.
    bool read(HostGroup& group);
    // The members (group indices) of hosts that will not take part in the operation of that sequence.
    std::vector<int> departed(std::uint64_t sequence) const;
    // Whether the rank at that address of the link has left.
    bool has_left(int address) const;

   private:
    struct Notice;
    struct Outgoing;
    struct Incoming {
        std::shared_ptr<Notice> notice;
        int source;  // address
        Link::Transfer transfer;
    };
    // For as long as the process lives: the link may read it.
    static void keep(std::unique_ptr<Outgoing> outgoing) noexcept;
    void announce(Outgoing& outgoing, std::int64_t last_sequence, std::string_view reason) noexcept;
    void send(Outgoing& outgoing) noexcept;
    void forget_sent() noexcept;
    void apply(const Notice& notice, int source, HostGroup& group);

    const Fabric& fabric_;
    mutable std::mutex mutex_;
    // Made before they are needed: an abort may be for want of memory.
    std::unique_ptr<Outgoing> abort_, departure_, leaving_;
    std::vector<Link::Transfer> sending_;
    std::vector<Incoming> arriving_;
    std::vector<int> left_;              // addresses
    std::vector<std::int64_t> left_at_;  // by host: last sequence it takes part in, kAbort while it is there
};

}  // namespace ring
