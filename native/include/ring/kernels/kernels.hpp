// Typed reductions: any number of sources into any number of destinations in one pass.
//
//   dst[d][i] = post(reduce over s of pre(src[s][i]))       for every d, i in [0, count)
//
// A destination may be one of the sources. Sources are combined in the order given, so that every rank that reduces
// the same sources gets the same bits. float16 and bfloat16 are computed in float32 and rounded once at the end;
// between hosts, after each host's part and after each addition of two parts. Integers are scaled in float64 and
// truncated (Horovod), and saturate where the factor takes them out of range. NaN propagates, in minima and maxima too.
#pragma once

#include <cstddef>
#include <string>

#include "ring/base/dtypes_and_ops.hpp"

namespace ring {

struct Scale {
    double pre = 1.0;
    double post = 1.0;
    // Average of integers: exact division that truncates, where post = 1/n would round 3/3 down to 0 for some n.
    long long divisor = 1;

    bool identity() const { return pre == 1.0 && post == 1.0 && divisor == 1; }
};

using ReduceFn = void (*)(void* const* dst, int dst_count, const void* const* src, int src_count, std::size_t count,
                          const Scale& scale);

// out = adasum(left, right); see src/kernels/adasum_impl.hpp. `out` is neither of the two.
using AdasumFn = void (*)(void* out, const void* left, const void* right, std::size_t count);

// Between float32 and a format of two bytes, rounded to nearest even. Neither may overlap the other.
using NarrowFn = void (*)(void* out, const float* in, std::size_t count);
using WidenFn = void (*)(float* out, const void* in, std::size_t count);

// float32 as bytes: one signed byte for each number, then one float32 scale for each block. A number is its byte times
// the scale of its block. The greatest magnitude of a block becomes 127 or -127, so a number changes by at most half of
// the scale. A block with a number that is not finite comes back as NaN.
struct Bytes {
    static constexpr std::size_t kBlock = 1024;

    // Bytes of `count` numbers.
    static constexpr std::size_t size(std::size_t count) {
        return count + (count + kBlock - 1) / kBlock * sizeof(float);
    }
};

// Packs the values, plus `left` unless null. `now_left`, unless null, gets the rounding errors, or the old `left` of a
// block that comes back as NaN; it may be `left`, else nothing overlaps.
using PackFn = void (*)(void* out, const float* values, const float* left, float* now_left, std::size_t count);
// Unpacks the numbers, which are added to those in `out` or replace them.
using UnpackFn = void (*)(float* out, const void* in, std::size_t count, bool adds);

struct KernelTable {
    const char* isa;
    PackFn pack;
    UnpackFn unpack;
    ReduceFn reduce[kValues<DType>][kValues<ReduceOp>];  // Average and Adasum are null: callers express them by Sum
    AdasumFn adasum[kValues<DType>];                     // null for integers and bool
    NarrowFn narrow[kValues<DType>];                     // null but for float16 and bfloat16
    WidenFn widen[kValues<DType>];
};

const KernelTable& kernels_baseline();
#if defined(__x86_64__)
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
#endif

// The table in use: the best that this processor runs, unless another one has been selected.
const KernelTable& kernels();
// Selects the table of an instruction set: baseline, avx2 or avx512 (RING_ISA), or the best for an empty name and where
// the processor lacks the set. Returns the table in use from now on. Call it before the first operation. Throws
// InvalidArgument for an unknown name.
const KernelTable& select_kernels(const std::string& isa);

// An average is a sum, divided afterwards. Null for Adasum, and for a reduction that the type lacks.
inline ReduceFn reduce_kernel(DType dtype, ReduceOp op) {
    return kernels().reduce[static_cast<int>(dtype)][static_cast<int>(op == ReduceOp::Average ? ReduceOp::Sum : op)];
}

}  // namespace ring
