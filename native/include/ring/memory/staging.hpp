// How a rank writes segments to ring memory: into the cache, or past it into memory.
//
// Cores with one last-level cache hand segments over in it, which is the fastest way. Cores without (two core complexes
// or sockets, or a virtual machine whose host has put it there for a while) fetch every line that another has written
// from a far cache, and memory would be faster. Nothing says which it is, so operations are timed both ways: a few of
// them at first, one in `probe_every` later.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/base/options.hpp"

namespace ring {

// Each rank decides for what it writes itself; its own thread alone uses this.
class Staging {
   public:
    explicit Staging(StagingWay way) : fixed_(way != StagingWay::Auto), choice_(way == StagingWay::Memory) {}
    // Whether an operation of that many bytes writes past the cache.
    bool past_cache(std::uint64_t bytes);
    // How long it took.
    void took(bool past_cache, std::uint64_t bytes, std::int64_t ns);

   private:
    static constexpr std::uint64_t kLeast = 1 << 20;  // bytes of an operation that is worth it
    // How often the other way is tried: the cache more often, whose speed it is that changes.
    static constexpr std::uint64_t probe_every(bool past_cache) { return past_cache ? 8 : 32; }
    static constexpr std::size_t kKept = 4;
    // The least of the last few: what disturbs an operation makes it slower, never faster.
    double least(bool past_cache) const;

    bool fixed_;
    bool choice_;
    std::uint64_t operations_ = 0;
    std::uint64_t timed_[2] = {0, 0};
    double ns_per_byte_[2][kKept] = {};
};

using CopyFn = void*(void*, const void*, std::size_t);
// memcpy past the cache, where the processor can; what it wrote is in order before whatever is stored next.
CopyFn stream_copy;

}  // namespace ring
