// Which host sends what to whom in which step: pure functions.
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

// How every host gets a block of every other one in ceil(log2 hosts) rounds, with one message each way in a round
// (Bruck et al. 1997). Before round k a host holds the blocks of 2^k hosts, its own first and those that follow it. It
// sends the first `blocks` of them to the host 2^k before it, and gets as many from the host 2^k behind it. Five hosts:
//
//              host 0                 host 1
//   round 0    0 to 4, 1 from 1       1 to 0, 2 from 2
//   round 1    0-1 to 3, 2-3 from 2   1-2 to 4, 3-4 from 3
//   round 2    0 to 1, 4 from 4       1 to 2, 0 from 0
struct Round {
    int to;
    int from;
    int blocks;
};
inline std::vector<Round> dissemination_plan(int hosts, int host) {
    std::vector<Round> rounds;
    for (int held = 1; held < hosts; held *= 2)
        rounds.push_back(
            {(host - held + hosts) % hosts, (host + held) % hosts, held < hosts - held ? held : hosts - held});
    return rounds;
}

// How all hosts get one sum in log2 hosts exchanges with one other host each (recursive doubling). If the number of
// hosts is no power of two, the even hosts of the first pairs give their sum to the next host first, and get the result
// at the end. Both sides of an exchange add the lower hosts' sum to the higher hosts', so all get the same bits. Five
// hosts:
//
//   host 0          host 1                  host 2       host 3       host 4
//   give to 1       take from 0
//                   exchange with 2         with 1       with 4       with 3
//                   exchange with 3         with 4       with 1       with 2
//   result from 1   result to 0
struct Exchange {
    enum class Kind { Give, Take, Both, GiveResult, TakeResult } kind;
    int peer;
};
inline std::vector<Exchange> doubling_plan(int hosts, int host) {
    using Kind = Exchange::Kind;
    int places = 1;
    while (places * 2 <= hosts) places *= 2;
    const int pairs = hosts - places;  // of the first hosts, which share a place
    const bool paired = host < 2 * pairs;
    if (paired && host % 2 == 0) return {{Kind::Give, host + 1}, {Kind::TakeResult, host + 1}};
    std::vector<Exchange> exchanges;
    if (paired) exchanges.push_back({Kind::Take, host - 1});
    const int place = paired ? host / 2 : host - pairs;
    for (int bit = 1; bit < places; bit *= 2) {
        const int other = place ^ bit;
        exchanges.push_back({Kind::Both, other < pairs ? 2 * other + 1 : other + pairs});
    }
    if (paired) exchanges.push_back({Kind::GiveResult, host - 1});
    return exchanges;
}

}  // namespace ring
