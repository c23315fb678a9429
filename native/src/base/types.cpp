#include "ring/base/types.hpp"

namespace ring {
namespace {

// A number from another process may have no name.
template <class Value, std::size_t n>
const char* name_of(Value value, const char* const (&names)[n]) {
    const auto index = static_cast<std::size_t>(value);
    return index < n ? names[index] : "unknown";
}

}  // namespace

std::size_t item_size(DType dtype) {
    static constexpr std::size_t sizes[kDTypes] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
    return sizes[static_cast<int>(dtype)];
}

const char* to_string(DType dtype) {
    static constexpr const char* names[kDTypes] = {"uint8",   "int8",     "int16",   "int32",   "int64",
                                                   "float16", "bfloat16", "float32", "float64", "bool"};
    return name_of(dtype, names);
}

const char* to_string(Device device) {
    static constexpr const char* names[kDevices] = {"cpu", "cuda", "xpu", "mps"};
    return name_of(device, names);
}

const char* to_string(ReduceOp op) {
    static constexpr const char* names[kReduceOps] = {"average", "sum", "adasum", "min", "max", "product"};
    return name_of(op, names);
}

const char* to_string(OpKind kind) {
    static constexpr const char* names[kOpKinds] = {"allreduce", "reducescatter", "allgather", "broadcast",
                                                    "alltoall",  "barrier",       "join",      "step",
                                                    "send",      "receive",       "commit"};
    return name_of(kind, names);
}

}  // namespace ring
