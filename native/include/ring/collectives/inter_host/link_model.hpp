// Pure functions that choose, by a model of a link, how leaders agree and how sums travel between hosts.
#pragma once

#include <cstdint>

namespace ring {

// Whether each leader sends its headers to each other one (the latency of one message), instead of by a
// dissemination_plan (the work of ceil(log2 hosts) messages).
bool agree_directly(std::uint64_t hosts);
// Whether a sum of that many bytes travels with the headers, where it fits.
bool goes_with_headers(std::uint64_t hosts, std::uint64_t bytes);
// Whether a sum that does not go with the headers is cheaper by a doubling_plan than around the ring.
bool sums_by_doubling(std::uint64_t hosts, std::uint64_t bytes);

}  // namespace ring
