#include "ring/collectives/costs.hpp"

#include <algorithm>
#include <string>

#include "collectives/inter_host/fabric_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/inter_host/link_model.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {
namespace {

std::uint64_t messages_of(std::uint64_t bytes) { return (bytes + Window::kMostBytes - 1) / Window::kMostBytes; }

// Each piece of a lane's chunk makes two rounds of the ring, each without its last hop.
Traffic ring(OpKind, const Load& load) {
    const std::uint64_t hops = 2 * (load.hosts - 1);
    const std::uint64_t pieces = load.local * load.hosts;
    return {hops * pieces * messages_of(load.bytes / pieces), hops * load.bytes};
}

// Each lane exchanges its chunk.
Traffic doubling(OpKind, const Load& load) {
    std::uint64_t sends = 0;
    for (std::uint64_t host = 0; host < load.hosts; ++host)
        for (const Exchange& one : doubling_plan(static_cast<int>(load.hosts), static_cast<int>(host)))
            sends += one.kind != Exchange::Kind::Take && one.kind != Exchange::Kind::TakeResult ? 1 : 0;
    return {sends * load.local, sends * load.bytes};
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
    {make_doubling_allreduce, doubling},      {make_ring_allreduce, ring},       {make_chain_broadcast, chain},
    {make_pairwise_reducescatter, scattered}, {make_landing_allgather, landing}, {make_gathered_adasum, landing},
    {make_pairwise_alltoall, pairwise},
};

// What travels with the headers of a host, whose ranks have tensors of so many bytes; of the root's in a broadcast.
std::uint64_t payload(OpKind kind, const Load& load) {
    switch (output_of(kind)) {
        case Output::Whole:
        case Output::Rows:
            return load.bytes;
        case Output::Parts:
            return load.local * load.bytes;
        case Output::Nothing:
        case Output::Message:
            break;
    }
    return 0;
}

// Where only the block of the root's host, 0, differs from the others, or each from every other, or none.
enum class Alike { All, ButRoot, None };

Traffic agreement(OpKind kind, const Load& load, std::uint64_t payload) {
    const bool tells_each = kind == OpKind::Join;
    const std::uint64_t headers = tells_each ? load.local : 1;  // where all ranks of a host call the same thing
    const std::uint64_t splits = kind == OpKind::Alltoall ? load.hosts * load.local * sizeof(std::int64_t) : 0;
    const std::uint64_t block = sizeof(MessageFront) + headers * sizeof(Header) + load.local * splits;
    const bool from_root = kind == OpKind::Broadcast && payload > 0;
    if (agree_directly(load.hosts)) {
        const std::uint64_t others = load.hosts - 1;
        const std::uint64_t senders = from_root ? 1 : load.hosts;
        return {load.hosts * others, load.hosts * others * block + senders * others * payload};
    }
    const Alike alike = from_root ? Alike::ButRoot : payload > 0 || tells_each ? Alike::None : Alike::All;
    Traffic all;
    const auto hosts = static_cast<int>(load.hosts);
    for (int host = 0; host < hosts; ++host)
        for (const Round& round : dissemination_plan(hosts, host)) {
            // Of the blocks in the message: runs of equal ones, and whether the root's is among them.
            const int root = (hosts - host) % hosts;
            const bool has_root = alike == Alike::ButRoot && root < round.blocks;
            std::uint64_t runs = alike == Alike::None ? static_cast<std::uint64_t>(round.blocks) : 1;
            if (has_root) runs += (root > 0 ? 1 : 0) + (root + 1 < round.blocks ? 1 : 0);
            const std::uint64_t bytes = runs * (sizeof(BlockRun) + block) + (alike == Alike::None ? runs
                                                                             : has_root           ? 1
                                                                                                  : 0) *
                                                                                payload;
            all.messages += packed_messages(bytes);
            all.bytes += sizeof(std::uint64_t) + bytes;
        }
    return all;
}

}  // namespace

Traffic agreement_traffic(OpKind kind, const Load& load) { return agreement(kind, load, 0); }

Traffic traffic_of(const Path& path, const Load& load) {
    if (!path.between_hosts) return {};
    if (path.make == make_eager) return agreement(path.kind, load, payload(path.kind, load));
    const Traffic all = agreement(path.kind, load, 0);
    if (output_of(path.kind) == Output::Nothing) return all;
    for (const Formula& one : kFormulas) {
        if (one.make != path.make) continue;
        const Traffic data = one.traffic(path.kind, load);
        return {all.messages + data.messages, all.bytes + data.bytes};
    }
    throw Error(std::string("there is no formula for the traffic of path ") + path.name);
}

}  // namespace ring
