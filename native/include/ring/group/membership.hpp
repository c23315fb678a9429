// Who takes part in the next epoch: the ranks of one host agree on it through their slots in ring memory alone.
//
// Every rank that wants to join says so in its slot (`wants`). The first candidate that lives leads: it waits until
// each other one either wants to join or has died. Then it decides: it writes the number of the new epoch into the slot
// of each rank that it counts on (`invited`) and last into its own (`decided`).
//
// A process that is dead stays dead, so the lead only moves on, and two living ranks never both lead. A rank that dies
// after it was counted on, or while it decides, makes that epoch fail to open; those that learn of it agree again. So
// each failed attempt costs a life, and there are not many.
#pragma once

#include <vector>

#include "ring/group/host_group.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

struct MembershipCall {
    std::vector<int> candidates;  // local ranks, ascending, the same on all of them; this rank among them
    std::uint64_t last = 0;       // newest epoch that this rank has tried to open
    std::uint64_t run = 0;        // that the epoch belongs to; 0 for none
    bool without_dead = false;    // leave out ranks that have died, instead of throwing Aborted
};

struct Membership {
    std::uint64_t epoch = 0;   // newer than any that a candidate has tried
    std::vector<int> members;  // of the candidates, ascending
};

// Throws Aborted when a candidate has died (unless `without_dead`) or left the run, and Timeout.
Membership agree_on_members(Domain& domain, const MembershipCall& call, double timeout, const Interruption& check);

}  // namespace ring
