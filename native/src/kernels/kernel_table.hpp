// The table of one instruction set. Each kernels_<isa>.cpp includes this once, compiled with its own flags.
#pragma once

#include "kernels/adasum_impl.hpp"
#include "kernels/bytes_impl.hpp"
#include "kernels/reduce_impl.hpp"

namespace {

template <class T, ring::DType dtype>
constexpr void fill_row(ring::KernelTable& table) {
    constexpr int row = static_cast<int>(dtype);
    for (int op = 0; op < ring::kValues<ReduceOp>; ++op)
        table.reduce[row][op] = kernel_of<T>(static_cast<ReduceOp>(op));
    if constexpr (ring::is_floating(dtype)) {
        table.adasum[row] = adasum<T>;
        if constexpr (sizeof(T) == 2) {
            table.narrow[row] = narrow<T>;
            table.widen[row] = widen<T>;
        }
    }
}

constexpr ring::KernelTable make_table(const char* isa) {
    ring::KernelTable table{};
    table.isa = isa;
    table.pack = pack;
    table.unpack = unpack;
#define RING_FILL_ROW(value, name, Element, ...) fill_row<Element, ring::DType::value>(table);
    RING_DTYPES(RING_FILL_ROW)
#undef RING_FILL_ROW
    return table;
}

}  // namespace
