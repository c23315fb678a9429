// Numbers as bytes, see Bytes in ring/kernels/kernels.hpp.
//
// Scales and roundings are the same to the bit on every instruction set: ranks on different processors must agree.
#pragma once

#include <float.h>

#include "kernels/reduce_impl.hpp"

namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
// Adding it leaves no bits for a fraction, so that the float unit rounds to an integer, to nearest even.
constexpr float kRounder = 12582912.0f;

// The bits of the greatest magnitude; those of an infinity or more where one of the values is not finite.
inline uint32_t greatest_bits(const float* values, size_t n) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = float_to_bits(values[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

// The scale by which the greatest magnitude becomes 127; 127 times the scale is finite.
inline float scale_of(uint32_t most) {
    if (most >= kInfinity) return bits_to_float(0x7fc00000u);
    float scale = bits_to_float(most) / 127.0f;
    if (scale < FLT_MIN) return FLT_MIN;
    while (scale * 127.0f > FLT_MAX) scale = bits_to_float(float_to_bits(scale) - 1);
    return scale;
}

void pack(void* out, const float* values, const float* left, float* now_left, size_t count) {
    auto* bytes = static_cast<signed char*>(out);
    auto* scales = static_cast<char*>(out) + count;
    for (size_t begin = 0; begin < count; begin += ring::Bytes::kBlock, scales += sizeof(float)) {
        const size_t n = smaller(ring::Bytes::kBlock, count - begin);
        alignas(64) float block[ring::Bytes::kBlock];
        memcpy(block, values + begin, n * sizeof(float));
        if (left != nullptr)
            for (size_t i = 0; i < n; ++i) block[i] += left[begin + i];
        const float scale = scale_of(greatest_bits(block, n));
        memcpy(scales, &scale, sizeof scale);
        if (scale != scale) {
            memset(bytes + begin, 0, n);
            for (size_t i = 0; now_left != nullptr && i < n; ++i)
                now_left[begin + i] = left == nullptr ? 0.0f : left[begin + i];
            continue;
        }
        for (size_t i = 0; i < n; ++i) {
            const float rounded = (block[i] / scale + kRounder) - kRounder;
            bytes[begin + i] = static_cast<signed char>(static_cast<int32_t>(rounded));
            block[i] -= rounded * scale;
        }
        if (now_left != nullptr) memcpy(now_left + begin, block, n * sizeof(float));
    }
}

void unpack(float* out, const void* in, size_t count, bool adds) {
    const auto* bytes = static_cast<const signed char*>(in);
    const auto* scales = static_cast<const char*>(in) + count;
    for (size_t begin = 0; begin < count; begin += ring::Bytes::kBlock, scales += sizeof(float)) {
        const size_t n = smaller(ring::Bytes::kBlock, count - begin);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        float* to = out + begin;
        const signed char* from = bytes + begin;
        if (adds) {
#pragma GCC ivdep
            for (size_t i = 0; i < n; ++i) to[i] += static_cast<float>(from[i]) * scale;
        } else {
#pragma GCC ivdep
            for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]) * scale;
        }
    }
}

}  // namespace
