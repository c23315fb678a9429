// Formulas of what each path sends between hosts; the table in collectives/paths.hpp has the costs within a host.
#pragma once

#include <cstdint>

#include "ring/collectives/paths.hpp"

namespace ring {

// An operation of `hosts` hosts with `local` ranks each, on tensors that divide evenly among all of them.
struct Load {
    std::uint64_t hosts = 1;
    std::uint64_t local = 1;
    std::uint64_t bytes = 0;  // of a rank's tensor: its input, or for a broadcast its output
};

// Of all hosts together.
struct Traffic {
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
};

// The headers and splits that the leaders exchange before each operation.
Traffic agreement_traffic(OpKind kind, const Load& load);
// All that a path sends, the agreement included.
Traffic traffic_of(const Path& path, const Load& load);

}  // namespace ring
