// Helpers of the algorithms between hosts.
#pragma once

#include <optional>
#include <vector>

#include "ring/collectives/host/algorithm.hpp"
#include "ring/collectives/inter_host/fabric.hpp"

namespace ring {

// The headers of the ranks of this host, in local order.
inline std::vector<Header> local_headers(const Fabric& fabric, const std::vector<Header>& all) {
    std::vector<Header> local;
    for (int member : fabric.members(fabric.host())) local.push_back(all[static_cast<std::size_t>(member)]);
    return local;
}

// The member of the next host (1) or of the one before (-1) in the ring of hosts that has this lane.
inline int neighbour(const Fabric& fabric, const HostGroup& group, int step) {
    const int host = (fabric.host() + fabric.hosts() + step) % fabric.hosts();
    return fabric.members(host)[static_cast<std::size_t>(group.index())];
}

MakeAlgorithm make_eager, make_ring_allreduce, make_doubling_allreduce, make_gathered_adasum, make_chain_broadcast;
MakeAlgorithm make_pairwise_reducescatter, make_landing_allgather, make_pairwise_alltoall;

}  // namespace ring
