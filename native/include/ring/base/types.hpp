// Element types, reductions and operations, as the whole core names them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring {

// The numbers are part of the Python interface (core/buffers.py) and of the header that ranks compare.
enum class DType : std::uint8_t {
    UInt8 = 0,
    Int8 = 1,
    Int16 = 2,
    Int32 = 3,
    Int64 = 4,
    Float16 = 5,
    BFloat16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bool = 9,
};
constexpr int kDTypes = 10;

// The kind of device whose memory a tensor lies in. The numbers are those of core/buffers.py.
enum class Device : std::uint8_t { Cpu = 0, Cuda = 1, Xpu = 2, Mps = 3 };
constexpr int kDevices = 4;
// Whether the core itself may read and write such a tensor.
constexpr bool in_host_memory(Device device) { return device == Device::Cpu; }

// Horovod's numbers for its constants.
enum class ReduceOp : std::uint8_t { Average = 0, Sum = 1, Adasum = 2, Min = 3, Max = 4, Product = 5 };
constexpr int kReduceOps = 6;

enum class OpKind : std::uint8_t {
    Allreduce = 0,
    ReduceScatter = 1,
    Allgather = 2,
    Broadcast = 3,
    Alltoall = 4,
    Barrier = 5,
    Join = 6,
    Step = 7,
    Send = 8,
    Receive = 9,
    Commit = 10,
};
constexpr int kOpKinds = 11;

std::size_t item_size(DType dtype);
const char* to_string(DType dtype);
const char* to_string(Device device);
const char* to_string(ReduceOp op);
const char* to_string(OpKind kind);

}  // namespace ring
