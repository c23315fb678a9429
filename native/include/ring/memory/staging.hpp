// How a rank writes segments to ring memory: into the cache, or past it into memory.
//
// Cores that share a last-level cache exchange segments through it, which is the fastest way. Other cores (on two core
// complexes or sockets, or in a virtual machine that its host has placed there for a while) fetch every line from a far
// cache, and memory is faster. No interface tells which it is, so operations are timed both ways: a few of them at
// first, later one in `probe_every`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/base/options.hpp"

namespace ring {

// Each rank decides for its own writes; only the thread that carries out operations uses this.
class Staging {
   public:
    explicit Staging(StagingWay way) : fixed_(way != StagingWay::Auto), choice_(way == StagingWay::Memory) {}
    // Whether an operation of that many bytes writes past the cache.
    bool past_cache(std::uint64_t bytes);
    // How long it took.
    void took(bool past_cache, std::uint64_t bytes, std::int64_t ns);

   private:
    static constexpr std::uint64_t kLeast = 1 << 20;  // smallest operation, in bytes, that is timed
    // How often the other way is tried: the cache more often, because it is the one whose speed changes.
    static constexpr std::uint64_t probe_every(bool past_cache) { return past_cache ? 8 : 32; }
    static constexpr std::size_t kKept = 4;
    // The minimum of the last few times: a disturbance makes an operation slower, never faster.
    double least(bool past_cache) const;

    bool fixed_;
    bool choice_;
    std::uint64_t operations_ = 0;
    std::uint64_t timed_[2] = {0, 0};
    double ns_per_byte_[2][kKept] = {};
};

using CopyFn = void*(void*, const void*, std::size_t);
// memcpy past the cache, where the processor can. Its writes are ordered before later stores.
CopyFn stream_copy;

}  // namespace ring
