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
bool lists_in_ring(const Situation& all) { return all.lead.tensors > 1 && in_ring(all); }
bool root_in_ring(const Situation& all) {
    const std::vector<int>& ranks = all.topology.ranks;
    const auto root = std::find(ranks.begin(), ranks.end(), all.lead.root) - ranks.begin();
    return all.headers[static_cast<std::size_t>(root)].input != kNowhere;
}

constexpr bool kOneHost = false;
constexpr bool kHosts = true;

// clang-format off
const std::vector<Path> kHostMemory = {
    // operation          hosts      path        when             gates             bytes                           messages             maker
    {OpKind::Barrier,       kOneHost, "gate",     always,          "1",              "0",                            "0",                 make_nothing},
    {OpKind::Commit,        kOneHost, "gate",     always,          "1",              "0",                            "0",                 make_nothing},
    {OpKind::Join,          kOneHost, "gate",     always,          "1",              "0",                            "0",                 make_join},
    {OpKind::Allreduce,     kOneHost, "adasum",   adasum,          "1+log2(p)",      "4*S+3*S*log2(p)",              "0",                 make_adasum},
    {OpKind::Allreduce,     kOneHost, "alone",    alone,           "1",              "2*S",                          "0",                 make_local_allreduce},
    {OpKind::Allreduce,     kOneHost, "one-shot", small,           "1",              "(p+3)*S",                      "0",                 make_one_shot_allreduce},
    {OpKind::Allreduce,     kOneHost, "list",     lists_in_ring,   "2",              "2*S",                          "0",                 make_push_list},
    {OpKind::Allreduce,     kOneHost, "push",     in_ring,         "2",              "2*S",                          "0",                 make_push_allreduce},
    {OpKind::Allreduce,     kOneHost, "staged",   always,          "2+ceil(S/seg)",  "(4*(p-1)/p+1+2/p)*S",          "0",                 make_staged_allreduce},
    {OpKind::ReduceScatter, kOneHost, "one-shot", small,           "1",              "(3+1/p)*S",                    "0",                 make_one_shot_reducescatter},
    {OpKind::ReduceScatter, kOneHost, "pull",     inputs_in_ring,  "2",              "(1+1/p)*S",                    "0",                 make_pull_reducescatter},
    {OpKind::ReduceScatter, kOneHost, "staged",   always,          "1+ceil(S/seg)",  "(3*(p-1)/p+2/p)*S",            "0",                 make_staged_reducescatter},
    {OpKind::Broadcast,     kOneHost, "one-shot", small,           "1",              "2*S",                          "0",                 make_one_shot_broadcast},
    {OpKind::Broadcast,     kOneHost, "pull",     root_in_ring,    "2",              "2*S",                          "0",                 make_pull_broadcast},
    {OpKind::Broadcast,     kOneHost, "staged",   always,          "1+ceil(S/seg)",  "2*S",                          "0",                 make_staged_broadcast},
    {OpKind::Allgather,     kOneHost, "one-shot", small,           "1",              "2*(p+1)*S",                    "0",                 make_one_shot_allgather},
    {OpKind::Allgather,     kOneHost, "pull",     inputs_in_ring,  "2",              "2*p*S",                        "0",                 make_pull_allgather},
    {OpKind::Allgather,     kOneHost, "staged",   always,          "1+ceil(S/seg)",  "2*(p+1)*S",                    "0",                 make_staged_allgather},
    {OpKind::Alltoall,      kOneHost, "one-shot", small,           "1",              "4*S",                          "0",                 make_one_shot_alltoall},
    {OpKind::Alltoall,      kOneHost, "pull",     inputs_in_ring,  "2",              "2*S",                          "0",                 make_pull_alltoall},
    {OpKind::Alltoall,      kOneHost, "staged",   always,          "1+ceil(S/seg)",  "4*S",                          "0",                 make_staged_alltoall},
    {OpKind::Step,          kOneHost, "push",     always,          "2",              "2*S and the state",            "0",                 make_push_step},

    {OpKind::Barrier,       kHosts,   "eager",    always,          "2",              "0",                            "1",                 make_nothing},
    {OpKind::Commit,        kHosts,   "eager",    always,          "2",              "0",                            "1",                 make_nothing},
    {OpKind::Join,          kHosts,   "eager",    always,          "2",              "0",                            "1",                 make_join},
    {OpKind::Allreduce,     kHosts,   "eager",    small,           "2",              "(l+h+3)*S",                    "1",                 make_eager},
    {OpKind::ReduceScatter, kHosts,   "eager",    small,           "2",              "(l+h+3)*S",                    "1",                 make_eager},
    {OpKind::Broadcast,     kHosts,   "eager",    small,           "2",              "4*S",                          "1",                 make_eager},
    {OpKind::Allgather,     kHosts,   "eager",    small,           "2",              "2*(p+l+1)*S",                  "1",                 make_eager},
    {OpKind::Alltoall,      kHosts,   "eager",    small,           "2",              "2*(l+2)*S",                    "1",                 make_eager},
    {OpKind::Allreduce,     kHosts,   "gathered", adasum,          "4",              "7*p*S",                        "1+l",               make_gathered_adasum},
    {OpKind::Allreduce,     kHosts,   "doubling", short_sum,       "3",              "(2+(2+3*log2(h))/l)*S",        "1+l",               make_doubling_allreduce},
    {OpKind::Allreduce,     kHosts,   "ring",     always,          "3",              "(2+6*(h-1)/h/l)*S",            "1+l*2*(h-1)*ceil(S/l/h/256K)", make_ring_allreduce},
    {OpKind::Broadcast,     kHosts,   "chain",    always,          "3",              "(2+2/l)*S",                    "1+l*ceil(S/l/256K)", make_chain_broadcast},
    {OpKind::ReduceScatter, kHosts,   "pairwise", always,          "3",              "(1+2*h/p)*S",                  "1+l",               make_pairwise_reducescatter},
    {OpKind::Allgather,     kHosts,   "landing",  always,          "4",              "3*p*S",                        "1+l",               make_landing_allgather},
    {OpKind::Alltoall,      kHosts,   "pairwise", always,          "3",              "2*S",                          "1+l*l",             make_pairwise_alltoall},
};
// clang-format on

// The paths over NCCL. The bytes cross the links between devices; NCCL's own algorithms decide how many.
// clang-format off
const std::vector<Path> kOnDevices = {
    {OpKind::Allreduce,     kOneHost, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::ReduceScatter, kOneHost, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Broadcast,     kOneHost, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Allgather,     kOneHost, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Alltoall,      kOneHost, "copy",     alone,           "1",              "2*S",                          "0",                 make_device_copy},
    {OpKind::Allreduce,     kOneHost, "nccl",     always,          "1",              "0",                            "0",                 make_nccl},
    {OpKind::ReduceScatter, kOneHost, "nccl",     always,          "1",              "0",                            "0",                 make_nccl},
    {OpKind::Broadcast,     kOneHost, "nccl",     always,          "1",              "0",                            "0",                 make_nccl},
    {OpKind::Allgather,     kOneHost, "nccl",     always,          "1",              "0",                            "0",                 make_nccl},
    {OpKind::Alltoall,      kOneHost, "nccl",     always,          "1",              "0",                            "0",                 make_nccl},

    {OpKind::Allreduce,     kHosts,   "nccl",     always,          "3",              "0",                            "2",                 make_nccl},
    {OpKind::ReduceScatter, kHosts,   "nccl",     always,          "3",              "0",                            "2",                 make_nccl},
    {OpKind::Broadcast,     kHosts,   "nccl",     always,          "3",              "0",                            "2",                 make_nccl},
    {OpKind::Allgather,     kHosts,   "nccl",     always,          "3",              "0",                            "2",                 make_nccl},
    {OpKind::Alltoall,      kHosts,   "nccl",     always,          "3",              "0",                            "2",                 make_nccl},
};
// clang-format on

// The only place that depends on the device.
const std::vector<Path>& paths_for(const Header& lead, const Topology& topology) {
    if (in_host_memory(lead.device)) return kHostMemory;
    if (lead.device != Device::Cuda || topology.devices == Topology::Devices::None)
        throw Unsupported(std::string("no transport for ") + to_string(lead.device) + " tensors of " +
                          to_string(lead.dtype) + "; copy them to host memory on every rank");
    const bool nccl = topology.devices == Topology::Devices::Nccl;
    return nccl && nccl_moves(lead, static_cast<int>(topology.ranks.size())) ? kOnDevices : kHostMemory;
}

}  // namespace

const std::vector<Path>& all_paths() {
    static const std::vector<Path> all = [] {
        std::vector<Path> paths = kHostMemory;
        paths.insert(paths.end(), kOnDevices.begin(), kOnDevices.end());
        return paths;
    }();
    return all;
}

bool is_launched(const Path& path) { return path.make == make_nccl || path.make == make_device_copy; }

bool takes_one_gate(const Path& path) { return std::strcmp(path.gates, "1") == 0 && !is_launched(path); }

const Path& choose(const std::vector<Header>& headers, const Topology& topology) {
    if (headers.empty()) throw InvalidArgument("a path is chosen for at least one rank, got no headers");
    const Situation situation{headers, lead_header(headers), topology};
    const bool between_hosts = topology.hosts > 1;
    for (const Path& path : paths_for(situation.lead, topology))
        if (path.kind == situation.lead.kind && path.between_hosts == between_hosts && path.fits(situation))
            return path;
    throw Error(std::string("no path for a ") + to_string(situation.lead.kind));
}

}  // namespace ring
