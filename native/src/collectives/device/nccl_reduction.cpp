#include "ring/collectives/device/nccl_reduction.hpp"

#include <cmath>
#include <cstring>

namespace ring {
namespace {

template <class Number>
std::uint64_t bits_of(Number number) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof number);
    return bits;
}

// The bits of `value` in a format of two bytes with that many bits of exponent and fraction; none where the value is
// not exactly a normal number of the format.
std::optional<std::uint64_t> two_bytes(double value, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = 0;
    const double fraction = std::ldexp(std::frexp(std::abs(value), &exponent), fraction_bits + 1);  // as an integer
    exponent -= 1;
    if (!std::isfinite(value) || value == 0.0 || fraction != std::floor(fraction) || exponent <= -bias ||
        exponent > bias)
        return std::nullopt;
    const auto sign = static_cast<std::uint64_t>(value < 0.0) << (exponent_bits + fraction_bits);
    const std::uint64_t implied = std::uint64_t{1} << fraction_bits;
    return sign | static_cast<std::uint64_t>(exponent + bias) << fraction_bits |
           (static_cast<std::uint64_t>(fraction) - implied);
}

// None for types whose factors the host applies.
std::optional<std::uint64_t> as_number_of(DType dtype, double value) {
    if (dtype == DType::Float64) return bits_of(value);
    if (dtype == DType::Float32) return bits_of(static_cast<float>(value));
    if (dtype == DType::Float16) return two_bytes(value, 5, 10);
    if (dtype == DType::BFloat16) return two_bytes(value, 8, 7);
    return std::nullopt;
}

}  // namespace

std::optional<NcclReduction> nccl_reduction_for(const Header& header, int size) {
    const std::optional<int> reduction = nccl_reduction(header.op);
    if (!reduction || !nccl_dtype(header.dtype)) return std::nullopt;
    const double factor = header.prescale * header.postscale;
    if (!is_sum(header.op)) {
        if (header.prescale != 1.0 || header.postscale != 1.0) return std::nullopt;
        return NcclReduction{*reduction, false, 0};
    }
    const double whole = header.op == ReduceOp::Average ? factor / size : factor;
    if (whole == 1.0 && header.prescale == 1.0) return NcclReduction{};
    if (!is_floating(header.dtype)) return std::nullopt;
    if (std::abs(whole * size - 1.0) < 1e-12) return NcclReduction{kNcclAverage, false, 0};
    const std::optional<std::uint64_t> number = as_number_of(header.dtype, whole);
    if (!number) return std::nullopt;
    return NcclReduction{0, true, *number};
}

}  // namespace ring
