// The interface between the preloaded allocator (native/preload) and the core: plain data and C functions.
//
// The allocator serves a program's large blocks, in private memory. When a collective works on a block again and again,
// the core reserves ring memory for it and the allocator *promotes* the block: its content moves there, its address
// stays. The table is the only symbol that the core looks for; where it is missing, no allocator is preloaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring {

// The allocator leaves smaller blocks to the C library.
constexpr std::size_t kLeastBlock = std::size_t{256} << 10;

// The memory of promoted blocks, the function that takes back their pages, and the number of bytes left before the
// out-of-memory killer acts.
struct PromotionSource {
    int fd;
    void* owner;
    void (*give_back)(void* owner, std::uint64_t offset);  // called with the allocator's lock held
    std::size_t (*memory_left)();
};

// Bytes and blocks at one moment.
struct PreloadCounts {
    std::size_t used;      // in blocks that the program holds
    std::size_t cached;    // in free blocks that keep their pages
    std::size_t promoted;  // of both, in ring memory
    std::size_t reserved;  // of address space, in blocks of all kinds
};

struct PreloadTable {
    // Begins to serve large blocks; false where there is no address space for it. Repeated calls do nothing.
    bool (*activate)();
    // Blocks may be promoted until `detach`; false where another owner is attached.
    bool (*attach)(const PromotionSource* source);
    void (*detach)(void* owner);
    // Offset in ring memory of `bytes` at `address` when they lie in a promoted block; else ~0.
    std::uint64_t (*offset_of)(const void* address, std::size_t bytes);
    // Counts a collective on `bytes` at `address`. Returns the bytes of ring memory that a promotion needs, where the
    // block is private and worth it; else 0. Never for a part of a block: other threads may write to the rest.
    std::size_t (*claim)(const void* address, std::size_t bytes);
    // Moves the block to `offset`, which is also mapped at `place`. False where the block stays private.
    bool (*promote)(const void* address, std::uint64_t offset, void* place);
    // No other tensor gets the ring memory at `offset`: when the block is freed it goes to `give_back`.
    void (*retire)(std::uint64_t offset);
    // Returns the pages of all free blocks to the system.
    void (*trim)();
    PreloadCounts (*counts)();
};

constexpr const char* kPreloadSymbol = "ring_preload_v1";

}  // namespace ring
