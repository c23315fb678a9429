// An allreduce of one tensor, as its caller describes it without taking any memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ring/base/types.hpp"

namespace ring {

struct SmallAllreduce {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::uint64_t count = 0;  // elements
    DType dtype = DType::UInt8;
    ReduceOp op = ReduceOp::Sum;
    double prescale = 1.0;
    double postscale = 1.0;
    int dims = 0;
    const std::int64_t* shape = nullptr;  // need not outlive the first wait
    std::string_view name;
};

}  // namespace ring
