// A message on its way, in the ring memory of its sender; sender and receiver both update it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/base/dtypes_and_ops.hpp"
#include "ring/base/shared_atomic.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

enum class EnvelopeState : std::uint32_t { Sent = 0, Taken = 1, Refused = 2 };

struct alignas(64) Envelope {
    std::uint64_t next = kNowhere;  // the envelope to the same receiver that was sent before
    std::int32_t from = 0;          // member
    std::int32_t tag = 0;
    DType dtype = DType::UInt8;
    std::uint64_t count = 0;
    std::uint64_t data = kNowhere;  // offset of the payload; kNowhere for a stream
    // The dtype and count that the receiver asked for, where it has refused the envelope.
    DType wanted_dtype = DType::UInt8;
    std::uint64_t wanted_count = 0;
    SharedAtomic<EnvelopeState> state{EnvelopeState::Sent};
    // Bytes of a stream so far; the difference is in the window, a circular buffer behind the envelope.
    alignas(64) SharedAtomic<std::uint64_t> filled{0};
    alignas(64) SharedAtomic<std::uint64_t> emptied{0};

    std::size_t bytes() const { return count * item_size(dtype); }
    std::byte* behind() { return reinterpret_cast<std::byte*>(this + 1); }
};

// Payloads up to this size in bytes are copied, and their sends complete at once, while not too many wait.
constexpr std::size_t kSmallBytes = 64 << 10;
constexpr std::size_t kMostWaiting = 1024;
// The window of a stream, small enough to stay in the cache between two cores.
constexpr std::size_t kWindowBytes = 512 << 10;
constexpr std::size_t kStepBytes = 128 << 10;

}  // namespace ring
