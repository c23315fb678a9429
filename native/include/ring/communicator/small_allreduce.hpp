// An allreduce of one or a few small tensors, as its caller describes it without taking any memory.
#pragma once

#include <cstdint>
#include <string_view>

#include "ring/collectives/host/algorithm.hpp"

namespace ring {

struct SmallAllreduce {
    const Piece* pieces = nullptr;
    int tensors = 1;
    std::uint64_t count = 0;  // elements of all of them
    DType dtype = DType::UInt8;
    ReduceOp op = ReduceOp::Sum;
    double prescale = 1.0;
    double postscale = 1.0;
    int dims = 0;                         // of one tensor; several have a layout
    const std::int64_t* shape = nullptr;  // of one; like `pieces` it need not outlive the first wait
    std::uint64_t layout = 0;
    std::string_view name;

    // The same for an operation of any size; `dimensions` is `shape`, or a copy that outlives it.
    Request request(const std::int64_t* dimensions) const {
        Request request;
        request.kind = OpKind::Allreduce;
        request.dtype = dtype;
        request.op = op;
        request.prescale = prescale;
        request.postscale = postscale;
        request.pieces.assign(pieces, pieces + tensors);
        request.shape.assign(dimensions, dimensions + dims);
        request.layout = layout;
        request.name = name;
        return request;
    }
};

}  // namespace ring
