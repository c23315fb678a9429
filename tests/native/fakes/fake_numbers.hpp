// The element types of the fake NCCL, by its numbers: read as double, and rounded to nearest even when written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// Also of none, from nowhere.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
}

std::size_t item_size(int dtype) {
    static constexpr std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[dtype];
}

double half_to_double(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const double fraction = bits & 1023;
    const double value = exponent == 0    ? std::ldexp(fraction, -24)
                         : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                          : std::ldexp(1024 + fraction, exponent - 25);
    return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t double_to_half(double value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    value = std::abs(value);
    if (std::isnan(value)) return 0x7e00;
    if (value >= 65520) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (value < std::ldexp(1, -14))
        return static_cast<std::uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(value, 24))));
    int exponent = 0;
    const double fraction = std::nearbyint(std::ldexp(std::frexp(value, &exponent), 11));  // 1024 to 2048
    return static_cast<std::uint16_t>(sign | (((exponent + 13) << 10) + static_cast<int>(fraction)));
}

double load(const char* at, int dtype) {
    const auto as = [at](auto number) {
        std::memcpy(&number, at, sizeof number);
        return number;
    };
    switch (dtype) {
        case 0:
            return as(std::int8_t{});
        case 1:
            return as(std::uint8_t{});
        case 2:
            return as(std::int32_t{});
        case 3:
            return as(std::uint32_t{});
        case 4:
            return static_cast<double>(as(std::int64_t{}));
        case 5:
            return static_cast<double>(as(std::uint64_t{}));
        case 6:
            return half_to_double(as(std::uint16_t{}));
        case 7:
            return as(float{});
        case 8:
            return as(double{});
        case 9: {
            const std::uint32_t bits = static_cast<std::uint32_t>(as(std::uint16_t{})) << 16;
            float value = 0;
            std::memcpy(&value, &bits, sizeof value);
            return value;
        }
    }
    std::fprintf(stderr, "fake NCCL: an element type that is not faked\\n");
    std::abort();
}

void save(char* at, int dtype, double value) {
    const auto as = [at](auto number) { std::memcpy(at, &number, sizeof number); };
    switch (dtype) {
        case 0:
            return as(static_cast<std::int8_t>(static_cast<std::int64_t>(value)));
        case 1:
            return as(static_cast<std::uint8_t>(static_cast<std::int64_t>(value)));
        case 2:
            return as(static_cast<std::int32_t>(static_cast<std::int64_t>(value)));
        case 3:
            return as(static_cast<std::uint32_t>(static_cast<std::int64_t>(value)));
        case 4:
            return as(static_cast<std::int64_t>(value));
        case 5:
            return as(static_cast<std::uint64_t>(static_cast<std::int64_t>(value)));
        case 6:
            return as(double_to_half(value));
        case 7:
            return as(static_cast<float>(value));
        case 8:
            return as(value);
        case 9: {
            const float single = static_cast<float>(value);
            std::uint32_t bits = 0;
            std::memcpy(&bits, &single, sizeof bits);
            return as(static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
        }
    }
}

}  // namespace
