#include "ring/memory/staging.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ring {
namespace {

// Writing past the cache must be clearly faster, because it takes memory bandwidth from the other ranks.
constexpr double kBetter = 0.9;

}  // namespace

bool Staging::past_cache(std::uint64_t bytes) {
    if (fixed_) return choice_;
    if (bytes < kLeast) return false;
    const std::uint64_t number = operations_++;
    if (number < 2 * kKept) return number % 2 == 1;
    if (number % probe_every(choice_) == 0) return !choice_;
    choice_ = least(true) < kBetter * least(false);
    return choice_;
}

void Staging::took(bool past_cache, std::uint64_t bytes, std::int64_t ns) {
    if (bytes < kLeast) return;
    const int way = past_cache ? 1 : 0;
    ns_per_byte_[way][timed_[way]++ % kKept] = static_cast<double>(ns) / static_cast<double>(bytes);
}

double Staging::least(bool past_cache) const {
    const double* kept = ns_per_byte_[past_cache ? 1 : 0];
    return *std::min_element(kept, kept + kKept);
}

void* stream_copy(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__)
    auto* out = static_cast<unsigned char*>(to);
    const auto* in = static_cast<const unsigned char*>(from);
    const std::size_t head = std::min(bytes, (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64);
    std::memcpy(out, in, head);
    std::size_t at = head;
    for (; at + 64 <= bytes; at += 64) {
        for (std::size_t part = at; part < at + 64; part += sizeof(__m128i))
            _mm_stream_si128(reinterpret_cast<__m128i*>(out + part),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + part)));
    }
    _mm_sfence();
    std::memcpy(out + at, in + at, bytes - at);
    return to;
#else
    return std::memcpy(to, from, bytes);
#endif
}

}  // namespace ring
