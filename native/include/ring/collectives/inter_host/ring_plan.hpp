// Who sends which piece to whom in which step of a ring: pure functions.
#pragma once

#include <vector>

namespace ring {

// A tensor is cut into one piece per host. In every hop each host sends one piece to the next host and receives one
// from the previous host. In the first hosts-1 hops the received piece is added to the own one (reduce-scatter); in the
// last hosts-1 it is complete and replaces the own one (allgather). Three hosts:
//
//            host 0          host 1          host 2
//   hop 0    send 0 add 2    send 1 add 0    send 2 add 1
//   hop 1    send 2 add 1    send 0 add 2    send 1 add 0
//   hop 2    send 1 put 0    send 2 put 1    send 0 put 2
//   hop 3    send 0 put 2    send 1 put 0    send 2 put 1
//
// 2(h-1)/h of the tensor crosses each link in each direction, which is optimal (Patarasuk and Yuan 2009).
struct Hop {
    int send;
    int receive;
    bool reduce;
};
inline std::vector<Hop> ring_plan(int hosts, int host) {
    std::vector<Hop> hops;
    const auto piece = [hosts](int index) { return ((index % hosts) + hosts) % hosts; };
    for (int step = 0; step < hosts - 1; ++step) hops.push_back({piece(host - step), piece(host - step - 1), true});
    for (int step = 0; step < hosts - 1; ++step) hops.push_back({piece(host + 1 - step), piece(host - step), false});
    return hops;
}

}  // namespace ring
