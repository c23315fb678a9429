// A hash of names and lists of ranks, the same in all processes.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ring {

// FNV-1a over the values of a range: bytes, or whole numbers.
template <class Values>
std::uint64_t hash_of(const Values& values) {
    std::uint64_t hash = 1469598103934665603ull;
    for (const auto value : values) {
        using Unsigned = std::make_unsigned_t<std::decay_t<decltype(value)>>;
        hash = (hash ^ static_cast<Unsigned>(value)) * 1099511628211ull;
    }
    return hash;
}

}  // namespace ring
