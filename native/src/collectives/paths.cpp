#include "ring/collectives/paths.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/device/launch.hpp"
#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/fabric_parts.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/device/nccl_reduction.hpp"
#include "ring/collectives/inter_host/link_model.hpp"

namespace ring {

// The algorithms, defined beside their classes.
MakeAlgorithm make_join, make_adasum;
MakeAlgorithm make_local_allreduce, make_one_shot_allreduce, make_push_allreduce, make_staged_allreduce;
MakeAlgorithm make_one_shot_reducescatter, make_pull_reducescatter, make_staged_reducescatter;
MakeAlgorithm make_one_shot_broadcast, make_pull_broadcast, make_staged_broadcast;
MakeAlgorithm make_one_shot_allgather, make_pull_allgather, make_staged_allgather;
MakeAlgorithm make_one_shot_alltoall, make_pull_alltoall, make_staged_alltoall;
MakeAlgorithm make_eager_allreduce, make_eager_reducescatter, make_eager_broadcast;
MakeAlgorithm make_eager_allgather, make_eager_alltoall;
MakeAlgorithm make_ring_allreduce, make_doubling_allreduce, make_gathered_adasum, make_chain_broadcast;
MakeAlgorithm make_pairwise_reducescatter, make_pairwise_alltoall;
MakeAlgorithm make_nccl_allreduce, make_nccl_reducescatter, make_nccl_broadcast;
MakeAlgorithm make_nccl_allgather, make_nccl_alltoall, make_device_copy;

namespace {

bool always(const Situation&) { return true; }
bool alone(const Situation& all) { return all.topology.ranks.size() == 1; }
bool adasum(const Situation& all) { return all.lead.op == ReduceOp::Adasum; }
// All payloads travel in mailboxes, and between hosts with the headers.
bool small(const Situation& all) { return all_inline(all.headers); }
bool inputs_in_ring(const Situation& all) { return all_in_ring(all.headers, false); }
bool in_ring(const Situation& all) { return all_in_ring(all.headers, true); }
bool short_sum(const Situation& all) {
    return sums_by_doubling(static_cast<std::uint64_t>(all.topology.hosts), all.lead.count * item_size(all.lead.dtype));
}
bool root_in_ring(const Situation& all) {
    const std::vector<int>& ranks = all.topology.ranks;
    const auto root = std::find(ranks.begin(), ranks.end(), all.lead.root) - ranks.begin();
    return all.headers[static_cast<std::size_t>(root)].input != kNowhere;
}

constexpr bool kOneHost = false;
constexpr bool kHosts = true;
constexpr bool kMemory = false;
constexpr bool kDevice = true;

// clang-format off
constexpr Path kPaths[] = {
    // operation            hosts     memory   path        when             gates             bytes                           messages             maker
    {OpKind::Barrier,       kOneHost, kMemory, "gate",     always,          "1",              "0",                            "0",                 make_nothing},
    {OpKind::Commit,        kOneHost, kMemory, "gate",     always,          "1",              "0",                            "0",                 make_nothing},
    {OpKind::Join,          kOneHost, kMemory, "gate",     always,          "1",              "0",                            "0",                 make_join},
    {OpKind::Allreduce,     kOneHost, kMemory, "adasum",   adasum,          "1+log2(p)",      "4*S+3*S*log2(p)",              "0",                 make_adasum},
    {OpKind::Allreduce,     kOneHost, kMemory, "alone",    alone,           "1",              "2*S",                          "0",                 make_local_allreduce},
    {OpKind::Allreduce,     kOneHost, kMemory, "one-shot", small,           "1",              "(p+3)*S",                      "0",                 make_one_shot_allreduce},
    {OpKind::Allreduce,     kOneHost, kMemory, "push",     in_ring,         "2",              "2*S",                          "0",                 make_push_allreduce},
    {OpKind::Allreduce,     kOneHost, kMemory, "staged",   always,          "2+ceil(S/seg)",  "(4*(p-1)/p+1+2/p)*S",          "0",                 make_staged_allreduce},
    {OpKind::ReduceScatter, kOneHost, kMemory, "one-shot", small,           "1",              "(3+1/p)*S",                    "0",                 make_one_shot_reducescatter},
    {OpKind::ReduceScatter, kOneHost, kMemory, "pull",     inputs_in_ring,  "2",              "(1+1/p)*S",                    "0",                 make_pull_reducescatter},
    {OpKind::ReduceScatter, kOneHost, kMemory, "staged",   always,          "1+ceil(S/seg)",  "(3*(p-1)/p+2/p)*S",            "0",                 make_staged_reducescatter},
    {OpKind::Broadcast,     kOneHost, kMemory, "one-shot", small,           "1",              "2*S",                          "0",                 make_one_shot_broadcast},
    {OpKind::Broadcast,     kOneHost, kMemory, "pull",     root_in_ring,    "2",              "2*S",                          "0",                 make_pull_broadcast},
    {OpKind::Broadcast,     kOneHost, kMemory, "staged",   always,          "1+ceil(S/seg)",  "2*S",                          "0",                 make_staged_broadcast},
    {OpKind::Allgather,     kOneHost, kMemory, "one-shot", small,           "1",              "2*(p+1)*S",                    "0",                 make_one_shot_allgather},
    {OpKind::Allgather,     kOneHost, kMemory, "pull",     inputs_in_ring,  "2",              "2*p*S",                        "0",                 make_pull_allgather},
    {OpKind::Allgather,     kOneHost, kMemory, "staged",   always,          "1+ceil(S/seg)",  "2*(p+1)*S",                    "0",                 make_staged_allgather},
    {OpKind::Alltoall,      kOneHost, kMemory, "one-shot", small,           "1",              "4*S",                          "0",                 make_one_shot_alltoall},
    {OpKind::Alltoall,      kOneHost, kMemory, "pull",     inputs_in_ring,  "2",              "2*S",                          "0",                 make_pull_alltoall},
    {OpKind::Alltoall,      kOneHost, kMemory, "staged",   always,          "1+ceil(S/seg)",  "4*S",                          "0",                 make_staged_alltoall},

    {OpKind::Barrier,       kHosts,   kMemory, "eager",    always,          "2",              "0",                            "1",                 make_nothing},
    {OpKind::Commit,        kHosts,   kMemory, "eager",    always,          "2",              "0",                            "1",                 make_nothing},
    {OpKind::Join,          kHosts,   kMemory, "eager",    always,          "2",              "0",                            "1",                 make_join},
    {OpKind::Allreduce,     kHosts,   kMemory, "eager",    small,           "2",              "(l+h+3)*S",                    "1",                 make_eager_allreduce},
    {OpKind::ReduceScatter, kHosts,   kMemory, "eager",    small,           "2",              "(l+h+3)*S",                    "1",                 make_eager_reducescatter},
    {OpKind::Broadcast,     kHosts,   kMemory, "eager",    small,           "2",              "4*S",                          "1",                 make_eager_broadcast},
    {OpKind::Allgather,     kHosts,   kMemory, "eager",    small,           "2",              "2*(p+l+1)*S",                  "1",                 make_eager_allgather},
    {OpKind::Alltoall,      kHosts,   kMemory, "eager",    small,           "2",              "2*(l+2)*S",                    "1",                 make_eager_alltoall},
    {OpKind::Allreduce,     kHosts,   kMemory, "gathered", adasum,          "4",              "7*p*S",                        "1+l",               make_gathered_adasum},
    {OpKind::Allreduce,     kHosts,   kMemory, "doubling", short_sum,       "3",              "(2+(2+3*log2(h))/l)*S",        "1+l",               make_doubling_allreduce},
    {OpKind::Allreduce,     kHosts,   kMemory, "ring",     always,          "3",              "(2+6*(h-1)/h/l)*S",            "1+l*2*(h-1)*ceil(S/l/h/256K)", make_ring_allreduce},
    {OpKind::Broadcast,     kHosts,   kMemory, "chain",    always,          "3",              "(2+2/l)*S",                    "1+l*ceil(S/l/256K)", make_chain_broadcast},
    {OpKind::ReduceScatter, kHosts,   kMemory, "pairwise", always,          "3",              "(1+2*h/p)*S",                  "1+l",               make_pairwise_reducescatter},
    {OpKind::Allgather,     kHosts,   kMemory, "landing",  always,          "4",              "3*p*S",                        "1+l",               make_landing_allgather},
    {OpKind::Alltoall,      kHosts,   kMemory, "pairwise", always,          "3",              "2*S",                          "1+l*l",             make_pairwise_alltoall},

    // Over NCCL. The bytes cross the links between devices; NCCL's own algorithms decide how many.
    {OpKind::Allreduce,     kOneHost, kDevice, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::ReduceScatter, kOneHost, kDevice, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Broadcast,     kOneHost, kDevice, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Allgather,     kOneHost, kDevice, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Alltoall,      kOneHost, kDevice, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Allreduce,     kOneHost, kDevice, "nccl",     always,          "1",              "0",                            "0",                 make_nccl_allreduce},
    {OpKind::ReduceScatter, kOneHost, kDevice, "nccl",     always,          "1",              "0",                            "0",                 make_nccl_reducescatter},
    {OpKind::Broadcast,     kOneHost, kDevice, "nccl",     always,          "1",              "0",                            "0",                 make_nccl_broadcast},
    {OpKind::Allgather,     kOneHost, kDevice, "nccl",     always,          "1",              "0",                            "0",                 make_nccl_allgather},
    {OpKind::Alltoall,      kOneHost, kDevice, "nccl",     always,          "1",              "0",                            "0",                 make_nccl_alltoall},
    {OpKind::Allreduce,     kHosts,   kDevice, "nccl",     always,          "3",              "0",                            "2",                 make_nccl_allreduce},
    {OpKind::ReduceScatter, kHosts,   kDevice, "nccl",     always,          "3",              "0",                            "2",                 make_nccl_reducescatter},
    {OpKind::Broadcast,     kHosts,   kDevice, "nccl",     always,          "3",              "0",                            "2",                 make_nccl_broadcast},
    {OpKind::Allgather,     kHosts,   kDevice, "nccl",     always,          "3",              "0",                            "2",                 make_nccl_allgather},
    {OpKind::Alltoall,      kHosts,   kDevice, "nccl",     always,          "3",              "0",                            "2",                 make_nccl_alltoall},
};
// clang-format on

constexpr bool has_path(OpKind kind, bool between_hosts, bool on_device) {
    for (const Path& path : kPaths)
        if (path.kind == kind && path.between_hosts == between_hosts && path.on_device == on_device) return true;
    return false;
}

// Messages between two ranks choose theirs in messages/.
constexpr bool all_have_paths() {
    for (int number = 0; number < kValues<OpKind>; ++number) {
        const auto kind = static_cast<OpKind>(number);
        if (output_of(kind) == Output::Message) continue;
        if (!has_path(kind, kOneHost, kMemory) || !has_path(kind, kHosts, kMemory)) return false;
    }
    return true;
}
static_assert(all_have_paths(), "an operation has no path");

bool moves_on_device(const Header& lead, const Topology& topology) {
    if (in_host_memory(lead.device)) return false;
    if (lead.device != Device::Cuda || topology.devices == Topology::Devices::None)
        throw Unsupported(std::string("no transport for ") + to_string(lead.device) + " tensors of " +
                          to_string(lead.dtype) + "; copy them to host memory on every rank");
    return topology.devices == Topology::Devices::Nccl && nccl_moves(lead, static_cast<int>(topology.ranks.size()));
}

}  // namespace

bool nccl_moves(const Header& header, int size) {
    if (!has_path(header.kind, kOneHost, kDevice)) return false;
    if (!reduces(header.kind)) return true;
    const std::optional<NcclReduction> reduction = nccl_reduction_for(header, size);
    return reduction && (size > 1 || !reduction->scaled);  // a single rank copies
}

std::vector<Path> all_paths() { return {std::begin(kPaths), std::end(kPaths)}; }

bool takes_one_gate(const Path& path) { return std::strcmp(path.gates, "1") == 0 && !path.on_device; }

const Path& choose(const std::vector<Header>& headers, const Topology& topology) {
    if (headers.empty()) throw InvalidArgument("a path is chosen for at least one rank, got no headers");
    const Situation situation{headers, lead_header(headers), topology};
    const bool between_hosts = topology.hosts > 1, on_device = moves_on_device(situation.lead, topology);
    for (const Path& path : kPaths)
        if (path.kind == situation.lead.kind && path.between_hosts == between_hosts && path.on_device == on_device &&
            path.fits(situation))
            return path;
    throw Error(std::string("no path for a ") + to_string(situation.lead.kind));
}

}  // namespace ring
