// Which algorithm carries an operation out, on one host and between several: one table, and one pure function that
// reads it. To add an algorithm, write its file and its line in the table of src/collectives/paths.cpp.
#pragma once

#include <memory>
#include <vector>

#include "ring/collectives/host/algorithm.hpp"
#include "ring/group/header.hpp"

namespace ring {

// Where the ranks of a group are.
struct Topology {
    std::vector<int> ranks;  // in the whole job, in the order of their headers
    int hosts = 1;
    // What the ranks have agreed on for tensors on CUDA devices.
    enum class Devices { None, Host, Nccl } devices = Devices::None;
};

// The input of a choice.
struct Situation {
    const std::vector<Header>& headers;
    const Header& lead;  // of the first rank that has not joined
    const Topology& topology;
};

// One line of the table. In its costs p is the number of ranks, h of hosts, l of ranks on each host; S is the bytes of
// a rank's tensor (of the largest one in an allgather, of p times the largest part in an alltoall), seg those of a
// segment.
struct Path {
    OpKind kind;
    bool between_hosts;
    bool on_device;  // ends when it has been launched; else host memory moves the data
    const char* name;
    bool (*fits)(const Situation&);  // the first path that fits is taken
    const char* gates;               // that each rank passes, including the one behind the headers
    const char* bytes;               // that each rank reads and writes in memory
    const char* messages;            // from a host to each host that it sends to, including the one with the headers
    MakeAlgorithm* make;
};

// A pure function of what all ranks of the group know, so that all of them choose the same path. Settings act through
// its input: RING_INLINE decides which headers are inline, RING_ALGORITHM=ring makes each rank a host. `headers` have
// passed find_mismatch. Tensors on devices that NCCL does not move are copied to host memory first.
// Throws Unsupported where nothing can move tensors of that device, and InvalidArgument for no headers.
const Path& choose(const std::vector<Header>& headers, const Topology& topology);

// Whether NCCL carries out the operation of that header among `size` ranks, as exactly as the core.
bool nccl_moves(const Header& header, int size);

// Whether an operation of this path completes at the gate of its headers: all data lies in the mailboxes, so once all
// ranks have arrived none needs another one.
bool takes_one_gate(const Path& path);

// All paths, in the order in which they are tried.
std::vector<Path> all_paths();

}  // namespace ring
