// Adasum of two vectors (Maleki et al. 2020), for one instruction set.
//
//   adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
//
// adds orthogonal components and averages parallel ones. Products are summed in float64.
#pragma once

#include "kernels/reduce_impl.hpp"

namespace {

template <class T>
void adasum(void* out, const void* left, const void* right, size_t count) {
    using A = typename Compute<T>::Type;
    const T* a = static_cast<const T*>(left);
    const T* b = static_cast<const T*>(right);
    alignas(64) A x[kBlock];
    alignas(64) A y[kBlock];
    double aa = 0.0, bb = 0.0, ab = 0.0;
    for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t n = smaller(kBlock, count - begin);
        load(x, a + begin, n);
        load(y, b + begin, n);
        for (size_t i = 0; i < n; ++i) {
            aa += static_cast<double>(x[i]) * static_cast<double>(x[i]);
            bb += static_cast<double>(y[i]) * static_cast<double>(y[i]);
            ab += static_cast<double>(x[i]) * static_cast<double>(y[i]);
        }
    }
    // A zero vector has no direction: the other one is taken whole.
    const A left_part = static_cast<A>(aa > 0.0 ? 1.0 - ab / (2.0 * aa) : 1.0);
    const A right_part = static_cast<A>(bb > 0.0 ? 1.0 - ab / (2.0 * bb) : 1.0);
    for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t n = smaller(kBlock, count - begin);
        load(x, a + begin, n);
        load(y, b + begin, n);
        for (size_t i = 0; i < n; ++i) x[i] = left_part * x[i] + right_part * y[i];
        store(static_cast<T*>(out) + begin, x, n);
    }
}

}  // namespace
