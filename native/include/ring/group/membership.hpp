// The number of the next generation: the ranks of one host agree on it through their slots in ring memory alone.
//
// Every rank that wants to join says so in its slot (`wants`). The first candidate leads: it waits until all others
// want to join. Then it decides: it writes the number of the new generation into the slot of each rank (`invited`) and
// last into its own (`decided`).
#pragma once

#include <vector>

#include "ring/group/host_group.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

struct GenerationCall {
    std::vector<int> candidates;  // local ranks, ascending, the same on all of them; this rank among them
    std::uint64_t last = 0;       // newest generation that this rank has tried to open
    std::uint64_t run = 0;        // that the generation belongs to; 0 for none
};

// A number newer than any that a candidate has tried. Throws Aborted when a candidate has died or left the run, and
// Timeout.
std::uint64_t agree_on_generation(RingMemory& ring_memory, const GenerationCall& call, double timeout,
                                  const Interruption& check);

}  // namespace ring
