// Sizes in bytes: of pages, rounded, and as text.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

namespace ring {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

inline std::string gib_text(std::size_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g GiB", static_cast<double>(bytes) / (1 << 30));
    return text;
}

}  // namespace ring
