// The reductions of one instruction set; kernel_table.hpp makes the table.
//
// Everything is in an unnamed namespace and calls no inline function of the standard library: a shared instantiation
// compiled for AVX-512 could otherwise be the one that the linker keeps for all.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "ring/kernels/kernels.hpp"

namespace {

using ring::BFloat;
using ring::Half;
using ring::ReduceOp;
using ring::Scale;

constexpr size_t kBlock = 1024;  // elements: the accumulators of a block stay in the first-level cache

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
    // Subnormal: the value is magnitude * 2^-24, which float32 holds exactly.
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return bits_to_float(sign | float_to_bits(value));
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 shifts the mantissa so that the float unit rounds it to a multiple of 2^-24, to nearest even.
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline void load(float* out, const Half* in, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < n; ++i) out[i] = half_to_float(in[i].bits);
}

inline void store(Half* out, const float* in, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) out[i].bits = float_to_half(in[i]);
}

inline void load(float* out, const BFloat* in, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = bits_to_float(static_cast<uint32_t>(in[i].bits) << 16);
}

inline void store(BFloat* out, const float* in, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = float_to_bits(in[i]);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const uint32_t nan = (bits >> 16) | 0x40u;
        out[i].bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

template <class T>
inline void load(T* out, const T* in, size_t n) {
    memcpy(out, in, n * sizeof(T));
}

template <class T>
inline void store(T* out, const T* in, size_t n) {
    memcpy(out, in, n * sizeof(T));
}

// The type in which values of type T are computed, and an unsigned type, whose overflow is defined.
template <class T>
struct Compute {
    using Type = T;
};
template <>
struct Compute<Half> {
    using Type = float;
};
template <>
struct Compute<BFloat> {
    using Type = float;
};

// For integers of 16 bits too: a product of two is computed in int and would overflow.
template <size_t bytes>
struct Unsigned {
    using Type = uint32_t;
};
template <>
struct Unsigned<8> {
    using Type = uint64_t;
};
template <class T, bool is_integer = static_cast<T>(1) / 2 == 0>
struct Wrapping {
    using Type = T;
};
template <class T>
struct Wrapping<T, true> {
    using Type = typename Unsigned<sizeof(T)>::Type;
};

template <class A>
inline A plus(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) + static_cast<W>(b));
}
inline bool plus(bool a, bool b) { return a | b; }

template <class A>
inline A times(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) * static_cast<W>(b));
}
inline bool times(bool a, bool b) { return a & b; }

#define RING_COMBINE(value, name, nccl, ...)                            \
    struct value {                                                      \
        template <class A>                                              \
        static auto apply([[maybe_unused]] A a, [[maybe_unused]] A b) { \
            return __VA_ARGS__;                                         \
        }                                                               \
    };
RING_REDUCE_OPS(RING_COMBINE)
#undef RING_COMBINE

// Truncates. Where a cast would be undefined, values beyond the integer's range become its limit, and NaN zero.
template <class A>
inline A to_integer(double value) {
    constexpr bool is_signed = static_cast<A>(-1) < static_cast<A>(0);
    constexpr int bits = 8 * static_cast<int>(sizeof(A)) - (is_signed ? 1 : 0);
    constexpr double top = 2.0 * static_cast<double>(uint64_t{1} << (bits - 1));  // beyond the largest
    constexpr A most = static_cast<A>(~uint64_t{0} >> (64 - bits));
    constexpr A least = is_signed ? static_cast<A>(-most - 1) : static_cast<A>(0);
    if (value >= top) return most;
    if (value <= static_cast<double>(least) - 1.0) return least;
    return value == value ? static_cast<A>(value) : static_cast<A>(0);
}

template <class A>
inline void multiply(A* values, size_t n, double factor) {
    for (size_t i = 0; i < n; ++i) values[i] = to_integer<A>(static_cast<double>(values[i]) * factor);
}
inline void multiply(double* values, size_t n, double factor) {
    for (size_t i = 0; i < n; ++i) values[i] *= factor;
}
inline void multiply(float* values, size_t n, double factor) {
    const float f = static_cast<float>(factor);
    for (size_t i = 0; i < n; ++i) values[i] *= f;
}
inline void multiply(bool*, size_t, double) {}

// Narrow integers may not hold the divisor, wide ones are divided by their own type: a signed one would be converted.
template <class A>
inline void divide(A* values, size_t n, long long divisor) {
    if constexpr (sizeof(A) < sizeof(int)) {
        for (size_t i = 0; i < n; ++i) values[i] = static_cast<A>(values[i] / static_cast<int>(divisor));
    } else {
        for (size_t i = 0; i < n; ++i) values[i] = static_cast<A>(values[i] / static_cast<A>(divisor));
    }
}
inline void divide(bool*, size_t, long long) {}

template <class Op, class A>
inline void combine(A* acc, const A* in, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], in[i]);
}

template <class T, class Op>
void reduce_blocks(void* const* dst, int dst_count, const void* const* src, int src_count, size_t count,
                   const Scale& scale) {
    using A = typename Compute<T>::Type;
    for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t n = smaller(kBlock, count - begin);
        alignas(64) A acc[kBlock];
        alignas(64) A next[kBlock];
        load(acc, static_cast<const T*>(src[0]) + begin, n);
        if (scale.pre != 1.0) multiply(acc, n, scale.pre);
        for (int s = 1; s < src_count; ++s) {
            load(next, static_cast<const T*>(src[s]) + begin, n);
            if (scale.pre != 1.0) multiply(next, n, scale.pre);
            combine<Op>(acc, next, n);
        }
        if (scale.divisor != 1) divide(acc, n, scale.divisor);
        if (scale.post != 1.0) multiply(acc, n, scale.post);
        for (int d = 0; d < dst_count; ++d) store(static_cast<T*>(dst[d]) + begin, acc, n);
    }
}

// Two sources into one or two destinations, the commonest case, without going through accumulators in memory.
// A destination may be a source, but only at the same index, hence ivdep.
template <class T, class Op>
void reduce_pair(void* const* dst, int dst_count, const void* const* src, size_t count, double post) {
    const T* a = static_cast<const T*>(src[0]);
    const T* b = static_cast<const T*>(src[1]);
    T* x = static_cast<T*>(dst[0]);
    T* y = static_cast<T*>(dst[dst_count - 1]);
    const T factor = static_cast<T>(post);
    if (dst_count == 1) {
#pragma GCC ivdep
        for (size_t i = 0; i < count; ++i) x[i] = Op::apply(a[i], b[i]) * factor;
    } else {
#pragma GCC ivdep
        for (size_t i = 0; i < count; ++i) {
            const T value = Op::apply(a[i], b[i]) * factor;
            x[i] = value;
            y[i] = value;
        }
    }
}

template <class T>
constexpr bool has_pairs = false;
template <>
constexpr bool has_pairs<float> = true;
template <>
constexpr bool has_pairs<double> = true;

template <class T, class Op>
void reduce(void* const* dst, int dst_count, const void* const* src, int src_count, size_t count, const Scale& scale) {
    if constexpr (has_pairs<T>) {
        if (src_count == 2 && dst_count <= 2 && scale.pre == 1.0 && scale.divisor == 1)
            return reduce_pair<T, Op>(dst, dst_count, src, count, scale.post);
    }
    reduce_blocks<T, Op>(dst, dst_count, src, src_count, count, scale);
}

template <class T>
void narrow(void* out, const float* in, size_t count) {
    store(static_cast<T*>(out), in, count);
}

template <class T>
void widen(float* out, const void* in, size_t count) {
    load(out, static_cast<const T*>(in), count);
}

// Null where callers express the reduction by Sum.
template <class T>
constexpr ring::ReduceFn kernel_of(ReduceOp op) {
    using A = typename Compute<T>::Type;
#define RING_KERNEL(value, ...)                                              \
    if constexpr (!std::is_null_pointer_v<decltype(value::apply(A{}, A{}))>) \
        if (op == ReduceOp::value) return reduce<T, value>;
    RING_REDUCE_OPS(RING_KERNEL)
#undef RING_KERNEL
    return nullptr;
}

}  // namespace
