#include "ring/collectives/costs.hpp"

#include <algorithm>
#include <string>

#include "collectives/inter_host/fabric_parts.hpp"
#include "ring/base/errors.hpp"

namespace ring {
namespace {

std::uint64_t messages_of(std::uint64_t bytes) { return (bytes + Window::kMostBytes - 1) / Window::kMostBytes; }

// The payload that travels with the headers: the sum over each host, or the tensors of its ranks.
Traffic eager(OpKind kind, const Load& load) {
    const std::uint64_t pairs = load.hosts * (load.hosts - 1);
    switch (kind) {
        case OpKind::Allreduce:
        case OpKind::ReduceScatter:
            return {0, pairs * load.bytes};
        case OpKind::Broadcast:
            return {0, (load.hosts - 1) * load.bytes};
        case OpKind::Allgather:
        case OpKind::Alltoall:
            return {0, pairs * load.local * load.bytes};
        default:
            return {};
    }
}

// Each piece of a lane's chunk makes two rounds of the ring, each without its last hop.
Traffic ring(OpKind, const Load& load) {
    const std::uint64_t hops = 2 * (load.hosts - 1);
    const std::uint64_t pieces = load.local * load.hosts;
    return {hops * pieces * messages_of(load.bytes / pieces), hops * load.bytes};
}

// Each lane forwards its chunk from host to host.
Traffic chain(OpKind, const Load& load) {
    return {(load.hosts - 1) * load.local * messages_of(load.bytes / load.local), (load.hosts - 1) * load.bytes};
}

// Every other host sends each rank the sum of its rows.
Traffic scattered(OpKind, const Load& load) {
    return {(load.hosts - 1) * load.hosts * load.local, (load.hosts - 1) * load.bytes};
}

// Each rank sends its tensor to every other host once.
Traffic landing(OpKind, const Load& load) {
    const std::uint64_t copies = (load.hosts - 1) * load.hosts * load.local;
    return {copies, copies * load.bytes};
}

// Each rank sends a part to each rank of the other hosts.
Traffic pairwise(OpKind, const Load& load) {
    const std::uint64_t ranks = load.hosts * load.local;
    const std::uint64_t others = ranks - load.local;
    return {ranks * others, others * load.bytes};
}

struct Formula {
    MakeAlgorithm* make;
    Traffic (*traffic)(OpKind kind, const Load& load);
};
constexpr Formula kFormulas[] = {
    {make_eager, eager},
    {make_ring_allreduce, ring},
    {make_chain_broadcast, chain},
    {make_pairwise_reducescatter, scattered},
    {make_landing_allgather, landing},
    {make_gathered_adasum, landing},
    {make_pairwise_alltoall, pairwise},
};

}  // namespace

Traffic agreement_traffic(OpKind kind, const Load& load) {
    const std::uint64_t messages = load.hosts * (load.hosts - 1);
    const bool tells_each = kind == OpKind::Join || kind == OpKind::Group;
    const std::uint64_t headers = tells_each ? load.local : 1;  // where all ranks of a host call the same thing
    const std::uint64_t splits = kind == OpKind::Alltoall ? load.hosts * load.local * sizeof(std::int64_t) : 0;
    return {messages, messages * (sizeof(MessageFront) + headers * sizeof(Header) + load.local * splits)};
}

Traffic traffic_of(const Path& path, const Load& load) {
    if (!path.between_hosts) return {};
    Traffic all = agreement_traffic(path.kind, load);
    const bool headers_say_all =
        path.kind == OpKind::Barrier || path.kind == OpKind::Commit || path.kind == OpKind::Join;
    if (headers_say_all) return all;
    for (const Formula& one : kFormulas) {
        if (one.make != path.make) continue;
        const Traffic data = one.traffic(path.kind, load);
        return {all.messages + data.messages, all.bytes + data.bytes};
    }
    throw Error(std::string("there is no formula for the traffic of path ") + path.name);
}

}  // namespace ring
