// Helpers for messages; FixedText takes no memory from the heap, for messages about a lack of memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace ring {

// Formatted as by printf, cut where it is too long.
class FixedText {
   public:
    __attribute__((format(printf, 2, 3))) explicit FixedText(const char* format, ...) noexcept {
        std::va_list values;
        va_start(values, format);
        std::vsnprintf(text_, sizeof text_, format, values);
        va_end(values);
    }
    operator std::string_view() const noexcept { return text_; }
    const char* c_str() const noexcept { return text_; }

   private:
    char text_[512];
};

// "rank 1 has", "ranks 1, 3 have"; a group may have its ranks in any order
inline std::string rank_list(std::vector<int> ranks) {
    std::sort(ranks.begin(), ranks.end());
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    return text + (ranks.size() == 1 ? " has" : " have");
}

// "rank 1", "ranks 0-2, 5"
inline std::string rank_ranges(std::vector<int> ranks) {
    std::sort(ranks.begin(), ranks.end());
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0, last = 0; i < ranks.size(); i = last + 1) {
        for (last = i; last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1;) ++last;
        text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
        if (last != i) text += "-" + std::to_string(ranks[last]);
    }
    return text;
}

// The ranks of these members of a group.
inline std::vector<int> ranks_of(const std::vector<int>& ranks, const std::vector<int>& members) {
    std::vector<int> own;
    for (int member : members) own.push_back(ranks[static_cast<std::size_t>(member)]);
    return own;
}

// Enough of a hash to see that two differ.
inline std::string digits(std::uint64_t hash) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(hash));
    return text;
}

// "0.5 s", "12 min", "1 h 30 min"
inline std::string seconds_text(double seconds) {
    char text[64];
    const double minutes = seconds / 60;
    if (minutes < 10) {
        std::snprintf(text, sizeof text, "%.1f s", seconds);
    } else if (minutes < 60) {
        std::snprintf(text, sizeof text, "%.0f min", minutes);
    } else {
        std::snprintf(text, sizeof text, "%.0f h %02d min", std::floor(minutes / 60), static_cast<int>(minutes) % 60);
    }
    return text;
}

// Copies a text to an array, cut so that a zero follows it.
template <std::size_t Size>
void set_text(char (&to)[Size], std::string_view text) {
    std::memset(to, 0, Size);
    text.copy(to, Size - 1);
}
// The text in such an array, also where a damaged one has no zero.
template <std::size_t Size>
std::string text_of(const char (&from)[Size]) {
    return {from, strnlen(from, Size)};
}

// A line on standard error.
inline void warn(const std::string& text) noexcept { std::fprintf(stderr, "[ring] %s\n", text.c_str()); }

}  // namespace ring
