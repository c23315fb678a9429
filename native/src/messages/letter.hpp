// A message on its way: what the sender writes into its ring memory, and what receiver and sender tell each other
// there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/base/shared_atomic.hpp"
#include "ring/base/types.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

enum class LetterState : std::uint32_t { Sent = 0, Taken = 1, Refused = 2 };

struct alignas(64) Letter {
    std::uint64_t next = kNowhere;  // the letter to the same receiver that was sent before
    std::int32_t from = 0;          // member
    std::int32_t tag = 0;
    DType dtype = DType::UInt8;
    std::uint64_t count = 0;
    std::uint64_t data = kNowhere;  // where all of it lies; kNowhere for a stream
    // What the receiver had asked for, where it has refused the letter.
    DType wanted_dtype = DType::UInt8;
    std::uint64_t wanted_count = 0;
    SharedAtomic<LetterState> state{LetterState::Sent};
    // Bytes of a stream so far: the difference lies in the window, a circular buffer behind the letter.
    alignas(64) SharedAtomic<std::uint64_t> filled{0};
    alignas(64) SharedAtomic<std::uint64_t> emptied{0};

    std::size_t bytes() const { return count * item_size(dtype); }
    std::byte* behind() { return reinterpret_cast<std::byte*>(this + 1); }
};

// A payload of at most so many bytes is copied, and its send is complete at once, while not too many wait.
constexpr std::size_t kSmallBytes = 64 << 10;
constexpr std::size_t kMostWaiting = 1024;
// Of a stream: it stays in the cache between the one core and the other.
constexpr std::size_t kWindowBytes = 512 << 10;
constexpr std::size_t kStepBytes = 128 << 10;

}  // namespace ring
