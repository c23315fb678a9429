#include "ring/collectives/inter_host/ring_plan.hpp"

namespace ring {

std::vector<Hop> ring_plan(int hosts, int host) {
    std::vector<Hop> hops;
    const auto piece = [hosts](int index) { return ((index % hosts) + hosts) % hosts; };
    for (int step = 0; step < hosts - 1; ++step) hops.push_back({piece(host - step), piece(host - step - 1), true});
    for (int step = 0; step < hosts - 1; ++step) hops.push_back({piece(host + 1 - step), piece(host - step), false});
    return hops;
}

}  // namespace ring
