// Texts for where there may be no memory left.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string_view>

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

}  // namespace ring
