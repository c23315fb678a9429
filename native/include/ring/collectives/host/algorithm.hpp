// The request, the result and the algorithm of an operation; the steps of the algorithm move the data.
//
// Fixed terms: a *chunk* is the part of a tensor that one rank owns in a reduction; a *segment* is a piece of a tensor
// in flight through ring memory. On one host data moves in one of these ways:
//
//   one-shot  through the mailboxes, as far as they hold it
//   push      in ring memory: the owner of a chunk reads it from all inputs and writes the result to all outputs
//   pull      in ring memory: each rank reads what it needs from the inputs
//   staged    segment by segment through ring memory
//
// An algorithm is a number of steps; between two steps lies a gate that all ranks of the group pass. A step touches
// memory and never waits. collectives/paths.hpp chooses the algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ring/group/header.hpp"
#include "ring/group/host_group.hpp"
#include "ring/kernels/kernels.hpp"

namespace ring {

class DeviceMemory;
class DeviceStream;
class NcclCommunicator;
struct DeviceWork;

// One tensor of an operation. Operations other than allreduce and alltoall have exactly one.
struct Piece {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::uint64_t count = 0;
};

// Where the elements from one rank go, in an allgather or alltoall.
struct Target {
    std::byte* data = nullptr;
    std::uint64_t count = 0;
};

struct Request {
    OpKind kind = OpKind::Barrier;
    DType dtype = DType::UInt8;
    Device device = Device::Cpu;  // that the pieces are on
    int device_index = 0;         // which one of that kind
    void* stream = nullptr;       // on which the caller has written them, and reads them next
    ReduceOp op = ReduceOp::Sum;
    double prescale = 1.0;
    double postscale = 1.0;
    int root = -1;  // index in the group
    std::vector<Piece> pieces;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> splits;  // alltoall: elements for each rank
    std::vector<Target> targets;       // allgather, alltoall: one for each rank; empty for memory of the result's own
    std::uint64_t layout = 0;
    int operations = 1;      // that the same call starts
    std::uint32_t site = 0;  // of its caller, in the log of operations
    std::string name;

    std::uint64_t count() const;
};

// The output of an operation besides the tensors that the caller gave.
struct Result {
    std::shared_ptr<std::byte> data;  // allgather, alltoall; a link may hold it too
    std::size_t bytes = 0;
    std::shared_ptr<DeviceMemory> on_device;  // the same, of tensors on devices
    std::vector<std::int64_t> counts;         // elements from each rank
    bool placed = false;                      // the parts are in the request's targets, and `data` is empty
    int last_joined = -1;
    std::uint64_t newest = 0;  // commit: the least of the ranks' numbers

    void allocate(std::size_t size);
    // Where the `counts` elements from each rank go: to the targets of the request if all have exactly these sizes,
    // else to memory of the result.
    std::vector<std::byte*> place(const Request& request, std::vector<std::int64_t> counts, std::size_t item);
};

enum class Step {
    Gate,  // pass a gate with the other ranks of this host before the next step
    Done,
    Moved,         // the link received or sent something, and may have more
    AwaitsLink,    // the link has to deliver first
    AwaitsDevice,  // waits for its turn on the device, or for NCCL to launch it
};

class Algorithm {
   public:
    virtual ~Algorithm() = default;
    // Does what can be done without waiting; `gates` counts the gates passed since the first step.
    virtual Step advance(std::uint64_t gates) = 0;
};

// On one host every step ends at a gate.
class GatedAlgorithm : public Algorithm {
   public:
    Step advance(std::uint64_t gates) final { return step(gates) ? Step::Done : Step::Gate; }

   protected:
    // Does step k; true when it was the last.
    virtual bool step(std::uint64_t k) = 0;
};

class Fabric;
class Agreement;

// An operation whose headers all ranks have agreed on.
struct Operation {
    HostGroup& group;
    const Request& request;
    const std::vector<Header>& headers;  // of all members
    Result& result;
    Fabric* fabric = nullptr;              // null on one host
    const Agreement* agreement = nullptr;  // between hosts: the splits and payloads that came with the headers
    DeviceStream* stream = nullptr;        // of tensors on devices
    NcclCommunicator* nccl = nullptr;      // null where the group has one rank
    DeviceWork* on_device = nullptr;       // the device side of this operation
};
// Makes the algorithm of an operation. The algorithm may keep references to all parts of the operation except, on one
// host, the headers.
using MakeAlgorithm = std::unique_ptr<Algorithm>(const Operation& operation);

// Copies a small payload into this rank's mailbox, before the first gate. True when it fitted. `index` is that of this
// rank in the whole group.
bool fill_inline(const HostGroup& group, const Request& request, int index, std::uint64_t sequence);

// Elements [begin, end) that rank `index` of `size` owns of `count`, on cache-line boundaries of `item` bytes each.
struct Range {
    std::uint64_t begin, end;
    std::uint64_t size() const { return end - begin; }
};
Range chunk_range(std::uint64_t count, int size, int index, std::size_t item);
// Elements that each rank owns after a reducescatter of `rows` rows: the first ones get one row more (Horovod).
Range row_range(std::uint64_t count, std::int64_t rows, int size, int index);

}  // namespace ring
