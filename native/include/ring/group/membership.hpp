// Who takes part in the next epoch, agreed among the ranks of one host through their slots in ring memory alone.
//
// Every rank that wants to go on says so in its slot (`wants`). The first candidate that lives leads: it waits until
// each other one either wants to go on or has died, and then decides, by writing the number of the new epoch into the
// slot of each rank that it counts on (`invited`) and last into its own (`decided`).
//
// A process that is dead stays dead, so the lead only moves on, and two living ranks never both lead. A rank that dies
// after it was counted on, or that leads and dies half way, makes the epoch that it was counted on for fail to open;
// whoever learns of that calls the roll again. So a call that comes to no epoch has cost a life, and there are not
// many.
#pragma once

#include <vector>

#include "ring/group/host_group.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

struct RollCall {
    std::vector<int> candidates;  // local ranks, ascending, the same on all of them; this rank among them
    std::uint64_t last = 0;       // newest epoch that this rank has tried to open
    std::uint64_t run = 0;        // that the epoch belongs to; 0 for none
    bool without_dead = false;    // go on without ranks that have died, instead of throwing Aborted
};

struct Answer {
    std::uint64_t epoch = 0;   // newer than any that a candidate has tried
    std::vector<int> members;  // of the candidates, ascending
};

// Throws Aborted when a candidate has died (unless `without_dead`) or left the run, and Timeout.
Answer call_roll(Domain& domain, const RollCall& call, double timeout, const Interruption& check);

}  // namespace ring
