// The part of DLPack's C ABI, version 1, that is used here: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ring/base/dtypes_and_ops.hpp"

namespace dlpack {

constexpr std::uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

enum DeviceType : std::int32_t { kCpu = 1 };
constexpr std::size_t kCodes = 16, kMostBytes = 8;

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    const std::int64_t* shape;
    const std::int64_t* strides;  // in elements; null where it is contiguous
    std::uint64_t byte_offset;
};

// The struct behind the capsule at a type's `__dlpack_c_exchange_api__`, as far as it is used.
struct ExchangeApi {
    std::uint32_t major, minor;
    const ExchangeApi* previous;
    void* managed_tensor_allocator;
    void* managed_tensor_from_object;
    void* managed_tensor_to_object;
    // Describes a tensor that the caller keeps alive. Returns 0, or -1 with a Python error set. May be null.
    int (*tensor_from_object)(void* object, Tensor* out);
    void* current_work_stream;
};

// The number of an element type, by its code and its bytes; -1 where the core lacks the type.
constexpr auto kByCode = [] {
    std::array<std::array<std::int8_t, kMostBytes + 1>, kCodes> all{};
    for (auto& row : all)
        for (auto& number : row) number = -1;
    for (int number = 0; number < ring::kValues<ring::DType>; ++number) {
        const auto dtype = static_cast<ring::DType>(number);
        all[ring::facts(ring::facts(dtype).numbers).dlpack][ring::item_size(dtype)] = static_cast<std::int8_t>(number);
    }
    return all;
}();

}  // namespace dlpack
