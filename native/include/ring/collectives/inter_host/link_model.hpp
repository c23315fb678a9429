// The model of a link by which the leaders' agreement and the sums between hosts are carried out: pure functions.
#pragma once

#include <cstdint>

namespace ring {

// Whether each leader sends its headers to each other one, instead of by a dissemination_plan: one message after which
// all have met costs less latency, ceil(log2 hosts) messages less work.
bool agree_directly(std::uint64_t hosts);
// Whether a sum of so many bytes travels with the headers, where it fits there.
bool goes_with_headers(std::uint64_t hosts, std::uint64_t bytes);
// Whether a sum that does not go with the headers is cheaper by a doubling_plan than around the ring.
bool sums_by_doubling(std::uint64_t hosts, std::uint64_t bytes);

}  // namespace ring
