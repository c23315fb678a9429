#include "ring/collectives/inter_host/link_model.hpp"

#include <algorithm>

#include "ring/collectives/inter_host/fabric.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {
namespace {

// What messages between hosts cost. Choices use these defaults on every host, because all of them must choose the same:
// TCP over 10 Gb/s Ethernet. On faster networks all three are smaller, which moves the choices little.
constexpr struct {
    double latency = 12e-6;   // s from host to host, whatever the size
    double handling = 5e-6;   // s of a host for each message that it sends and one that it takes
    double per_byte = 8e-10;  // s on the wire
    double per_sum = 3e-10;   // s for each byte that is added, where nothing is on the wire meanwhile
} kLink;
constexpr std::uint64_t kBlock = sizeof(MessageFront) + sizeof(Header);  // of a host in an agreement

double seconds(std::uint64_t count, double each) { return static_cast<double>(count) * each; }

std::uint64_t rounds(std::uint64_t hosts) { return dissemination_plan(static_cast<int>(hosts), 0).size(); }

// Exchanges of the busiest host, which takes part in all of them.
std::uint64_t exchanges(std::uint64_t hosts) {
    const auto last = static_cast<int>(hosts) - 1;
    return std::max(doubling_plan(static_cast<int>(hosts), last).size(),
                    hosts > 2 ? doubling_plan(static_cast<int>(hosts), 1).size() : 0);
}

double doubling_time(std::uint64_t hosts, std::uint64_t bytes) {
    return seconds(exchanges(hosts), kLink.latency + kLink.handling + seconds(bytes, kLink.per_byte + kLink.per_sum));
}

}  // namespace

bool agree_directly(std::uint64_t hosts) {
    return kLink.latency + seconds(hosts - 1, kLink.handling) <= seconds(rounds(hosts), kLink.latency + kLink.handling);
}

// Blocks with different payloads do not travel as one, so by a plan a payload makes the whole agreement longer.
bool goes_with_headers(std::uint64_t hosts, std::uint64_t bytes) {
    const std::uint64_t more = bytes + (agree_directly(hosts) ? 0 : kBlock);
    return hosts == 1 || seconds((hosts - 1) * more, kLink.per_byte) <= doubling_time(hosts, bytes);
}

bool sums_by_doubling(std::uint64_t hosts, std::uint64_t bytes) {
    const std::uint64_t hops = ring_plan(static_cast<int>(hosts), 0).size();
    return doubling_time(hosts, bytes) <
           seconds(hops, kLink.latency + kLink.handling + seconds(bytes, kLink.per_byte) / static_cast<double>(hosts));
}

}  // namespace ring
