// Element types, reductions, operations and devices. Each is declared once, in a list: the enum, names, numbers and
// every other table are made from it, in Python too. A `switch` over one of these enums has no default, so the compiler
// finds the places that must know of a new value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace ring {

// The names of an enum's values, which are numbered from 0.
template <class Enum>
struct Names;

#define RING_VALUE(value, ...) value,
#define RING_NAME(...) RING_SECOND(__VA_ARGS__, )
#define RING_SECOND(value, name, ...) name,
// An enum of the values in a list X(value, "name", ...).
#define RING_ENUM(Enum, Number, LIST)                           \
    enum class Enum : Number { LIST(RING_VALUE) };              \
    template <>                                                 \
    struct Names<Enum> {                                        \
        static constexpr const char* all[] = {LIST(RING_NAME)}; \
    }

template <class Enum>
constexpr int kValues = static_cast<int>(std::size(Names<Enum>::all));

// A number from another process may have no name.
template <class Enum>
constexpr bool is_known(Enum value) {
    return static_cast<std::size_t>(value) < std::size(Names<Enum>::all);
}
template <class Enum, class = decltype(Names<Enum>::all)>
constexpr const char* to_string(Enum value) {
    return is_known(value) ? Names<Enum>::all[static_cast<std::size_t>(value)] : "unknown";
}

// --- element types ---

struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};

// X(what elements hold, name, whether these are integers, floating point numbers, code in DLPack)
#define RING_NUMBERS(X)                     \
    X(Unsigned, "unsigned", true, false, 1) \
    X(Signed, "signed", true, false, 0)     \
    X(Float, "IEEE float", false, true, 2)  \
    X(Brain, "brain float", false, true, 4) \
    X(Bool, "bool", false, false, 6)
RING_ENUM(Numbers, std::uint8_t, RING_NUMBERS);

struct NumbersFacts {
    bool are_integers, are_floating;
    std::uint8_t dlpack;
};
#define RING_FACTS(value, name, integers, floating, dlpack) {integers, floating, dlpack},
constexpr NumbersFacts kNumbersFacts[] = {RING_NUMBERS(RING_FACTS)};
#undef RING_FACTS
constexpr NumbersFacts facts(Numbers numbers) { return kNumbersFacts[static_cast<std::size_t>(numbers)]; }

constexpr int kNoNumber = -1;

// X(value, name here and in frameworks, an element, what it holds, number in NCCL, number in XLA's C interface)
#define RING_DTYPES(X)                                         \
    X(UInt8, "uint8", std::uint8_t, Unsigned, 1, 6)            \
    X(Int8, "int8", std::int8_t, Signed, 0, 2)                 \
    X(Int16, "int16", std::int16_t, Signed, kNoNumber, 3)      \
    X(Int32, "int32", std::int32_t, Signed, 2, 4)              \
    X(Int64, "int64", std::int64_t, Signed, 4, 5)              \
    X(Float16, "float16", Half, Float, 6, 10)                  \
    X(BFloat16, "bfloat16", BFloat, Brain, 9, 16)              \
    X(Float32, "float32", float, Float, 7, 11)                 \
    X(Float64, "float64", double, Float, 8, 12)                \
    X(Bool, "bool", bool, Bool, kNoNumber, 1)                  \
    X(UInt16, "uint16", std::uint16_t, Unsigned, kNoNumber, 7) \
    X(UInt32, "uint32", std::uint32_t, Unsigned, 3, 8)         \
    X(UInt64, "uint64", std::uint64_t, Unsigned, 5, 9)
RING_ENUM(DType, std::uint8_t, RING_DTYPES);

struct DTypeFacts {
    std::size_t bytes;
    Numbers numbers;
    int nccl, xla;
};
#define RING_FACTS(value, name, Element, numbers, nccl, xla) {sizeof(Element), Numbers::numbers, nccl, xla},
constexpr DTypeFacts kDTypeFacts[] = {RING_DTYPES(RING_FACTS)};
#undef RING_FACTS

constexpr DTypeFacts facts(DType dtype) {
    return is_known(dtype) ? kDTypeFacts[static_cast<std::size_t>(dtype)]
                           : DTypeFacts{1, Numbers::Unsigned, kNoNumber, kNoNumber};
}
constexpr std::size_t item_size(DType dtype) { return facts(dtype).bytes; }
constexpr bool is_floating(DType dtype) { return facts(facts(dtype).numbers).are_floating; }
constexpr bool is_integer(DType dtype) { return facts(facts(dtype).numbers).are_integers; }

// --- devices ---

// The kind of device whose memory a tensor lies in.
#define RING_DEVICES(X) X(Cpu, "cpu") X(Cuda, "cuda") X(Xpu, "xpu") X(Mps, "mps")
RING_ENUM(Device, std::uint8_t, RING_DEVICES);
// Whether the core itself may read and write such a tensor.
constexpr bool in_host_memory(Device device) { return device == Device::Cpu; }

// --- reductions ---

// X(value, name, NCCL's number of the reduction or of the one that expresses it, a and b combined), in the order of
// Horovod's constants. On NCCL an average is a sum of divided inputs. Reductions that callers express by Sum have no
// kernel. A NaN on either side wins in Min and Max, as in torch and NumPy: `a` because no comparison with it holds.
#define RING_REDUCE_OPS(X)                    \
    X(Average, "average", 0, nullptr)         \
    X(Sum, "sum", 0, plus(a, b))              \
    X(Adasum, "adasum", kNoNumber, nullptr)   \
    X(Min, "min", 3, b < a || b != b ? b : a) \
    X(Max, "max", 2, a < b || b != b ? b : a) \
    X(Product, "product", 1, times(a, b))
RING_ENUM(ReduceOp, std::uint8_t, RING_REDUCE_OPS);
#define RING_NUMBER(value, name, nccl, ...) nccl,
constexpr int kNcclReductions[] = {RING_REDUCE_OPS(RING_NUMBER)};
#undef RING_NUMBER

// Whether the ranks' tensors are added up.
constexpr bool is_sum(ReduceOp op) {
    switch (op) {
        case ReduceOp::Average:
        case ReduceOp::Sum:
            return true;
        case ReduceOp::Adasum:
        case ReduceOp::Min:
        case ReduceOp::Max:
        case ReduceOp::Product:
            return false;
    }
    return false;
}

// --- operations ---

// Whole: a tensor as large as the input; Rows: a part of that; Parts: what each rank sends, as many elements as it
// likes, in memory of the result's own.
enum class Output : std::uint8_t { Nothing, Whole, Rows, Parts, Message };

// X(value, name, whether it reduces, output)
#define RING_OPERATIONS(X)                        \
    X(Allreduce, "allreduce", true, Whole)        \
    X(ReduceScatter, "reducescatter", true, Rows) \
    X(Allgather, "allgather", false, Parts)       \
    X(Broadcast, "broadcast", false, Whole)       \
    X(Alltoall, "alltoall", false, Parts)         \
    X(Barrier, "barrier", false, Nothing)         \
    X(Join, "join", false, Nothing)               \
    X(Send, "send", false, Message)               \
    X(Receive, "receive", false, Message)         \
    X(Commit, "commit", false, Nothing)
RING_ENUM(OpKind, std::uint8_t, RING_OPERATIONS);

struct OperationFacts {
    bool reduces;
    Output output;
};
#define RING_FACTS(value, name, reduces, output) {reduces, Output::output},
constexpr OperationFacts kOperationFacts[] = {RING_OPERATIONS(RING_FACTS)};
#undef RING_FACTS

// Also for an unknown number, which messages describe too.
constexpr OperationFacts facts(OpKind kind) {
    return is_known(kind) ? kOperationFacts[static_cast<std::size_t>(kind)] : OperationFacts{false, Output::Whole};
}
constexpr bool reduces(OpKind kind) { return facts(kind).reduces; }
constexpr Output output_of(OpKind kind) { return facts(kind).output; }

}  // namespace ring
