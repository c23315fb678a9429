// The model of a link by which the leaders' agreement and the sums between hosts are carried out: pure functions.
#pragma once

#include <cstdint>

namespace ring {

// What messages between hosts cost. Choices use these defaults on every host, because all of them must choose the same:
// TCP over 10 Gb/s Ethernet. On faster networks all three are smaller, which moves the choices little.
struct LinkModel {
    double latency = 12e-6;   // s from host to host, whatever the size
    double handling = 5e-6;   // s of a host for each message that it sends and one that it takes
    double per_byte = 8e-10;  // s on the wire
    double per_sum = 3e-10;   // s for each byte that is added, where nothing is on the wire meanwhile
};

// Whether each leader sends its headers to each other one, instead of by a dissemination_plan: one message after which
// all have met costs less latency, ceil(log2 hosts) messages less work.
bool agree_directly(std::uint64_t hosts);
// Whether a sum of so many bytes travels with the headers, where it fits there.
bool goes_with_headers(std::uint64_t hosts, std::uint64_t bytes);
// Whether a sum that does not go with the headers is cheaper by a doubling_plan than around the ring.
bool sums_by_doubling(std::uint64_t hosts, std::uint64_t bytes);

}  // namespace ring
