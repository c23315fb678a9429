// The part of DLPack's C ABI, version 1, that is read here: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace dlpack {

constexpr std::uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

enum DeviceType : std::int32_t { kCpu = 1 };
enum Code : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    Code code;
    std::uint8_t bits;
    std::uint16_t lanes;
    const std::int64_t* shape;
    const std::int64_t* strides;  // in elements; null where it is contiguous
    std::uint64_t byte_offset;
};

// What the capsule at a type's `__dlpack_c_exchange_api__` points to, as far as it is used.
struct ExchangeApi {
    std::uint32_t major, minor;
    const ExchangeApi* previous;
    void* managed_tensor_allocator;
    void* managed_tensor_from_object;
    void* managed_tensor_to_object;
    // Of a tensor that the caller keeps alive. 0, or -1 with a Python error set. May be null.
    int (*tensor_from_object)(void* object, Tensor* out);
    void* current_work_stream;
};

}  // namespace dlpack
