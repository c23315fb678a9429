#include "ring/base/types.hpp"

namespace ring {

std::size_t item_size(DType dtype) {
    static constexpr std::size_t sizes[kDTypes] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
    return sizes[static_cast<int>(dtype)];
}

const char* to_string(DType dtype) {
    static constexpr const char* names[kDTypes] = {"uint8",   "int8",     "int16",   "int32",   "int64",
                                                   "float16", "bfloat16", "float32", "float64", "bool"};
    return names[static_cast<int>(dtype)];
}

const char* to_string(Device device) {
    static constexpr const char* names[kDevices] = {"cpu", "cuda", "xpu", "mps"};
    return names[static_cast<int>(device)];
}

const char* to_string(ReduceOp op) {
    static constexpr const char* names[kReduceOps] = {"average", "sum", "adasum", "min", "max", "product"};
    return names[static_cast<int>(op)];
}

const char* to_string(OpKind kind) {
    static constexpr const char* names[kOpKinds] = {"allreduce", "reducescatter", "allgather", "broadcast",
                                                    "alltoall",  "barrier",       "join",      "group",
                                                    "step",      "send",          "receive"};
    return names[static_cast<int>(kind)];
}

}  // namespace ring
