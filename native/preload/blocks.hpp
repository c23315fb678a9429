// The large blocks of one process: size classes in one range of addresses, and which free blocks keep their pages.
//
// Fixed terms. A block is *fresh* while it has no pages, *used* while the program holds it, and *cached* when it is
// free and keeps its pages. It is *private* memory, copied on write after a fork, or *promoted*: mapped from ring
// memory. A fresh block that was promoted is *closed*: it must not be accessed until it is used again. A free block is
// *stuck* while it is mapped from ring memory that others may write to, because the process has no mapping left to
// replace it (`vm.max_map_count`).
//
// A block keeps the size of its class for ever; classes are 1/16 apart, so at most 6 % of a block are wasted. Free
// blocks keep their pages as long as all blocks together stay below the program's recent peak plus 1/16 of it plus 16
// MiB: so the program takes hardly more memory than it would anyway. Beyond that private blocks lose their pages, those
// freed first, then promoted blocks.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

#include "ring/memory/preload_table.hpp"

namespace ring::preload {

constexpr std::size_t kGranule = std::size_t{16} << 10;  // every block begins and ends at a multiple
constexpr int kSteps = 16;                               // classes from one power of two to the next
constexpr int kClasses = 23 * kSteps;
constexpr std::uint64_t kPrivate = ~std::uint64_t{0};  // instead of an offset in ring memory
constexpr std::uint64_t kOrphaned = kPrivate - 1;      // promoted by a core that is gone

struct Block {
    std::uint64_t ring;  // offset, kPrivate or kOrphaned; read without the lock
    std::size_t requested;
    char* data;
    std::uint32_t previous, next;  // of the same class and kind, in the order of their release
    std::uint32_t older, newer;    // cached, of the same kind and all classes
    std::uint16_t size_class;
    enum class State : std::uint8_t { Fresh, Used, Cached, Stuck } state;
    bool retired, closed;
};

// Guards the rest. Locked before a fork, so that the child gets a consistent state.
extern pthread_mutex_t lock;
// Held while a block is neither private nor promoted; locked before `lock`.
extern pthread_mutex_t promoting;

// Start of the blocks' addresses; there are none while `span()` is 0.
extern char* base;
extern std::size_t span_bytes;
inline std::size_t span() { return __atomic_load_n(&span_bytes, __ATOMIC_ACQUIRE); }
inline bool is_ours(const void* address) {
    const std::size_t bytes = span();  // read before `base`, which is written first
    return bytes != 0 && static_cast<std::size_t>(static_cast<const char*>(address) - base) < bytes;
}

bool activate();
// Null where it has no block of that size; then the C library serves the call.
void* take(std::size_t bytes);
void give(void* address);
// The block that begins at the address. Ends the process where none does, as a C library does for such a `free`.
Block& expect_block(const void* address);
std::size_t size_of(const Block& block);
// The block that the address lies in; null where it lies in none.
Block* find_block(const void* address);
// Returns the pages of a cached or stuck block to the system. False, and no change, where the process has no mapping
// left.
bool drop_pages(Block& block);
// Marks a cached block as stuck: it must not be used again before its pages are dropped.
void set_aside(Block& block);
template <class Visit>
void for_all(Visit&& visit);

extern Block* blocks;  // from 1 to block_count
extern std::uint32_t block_count;
template <class Visit>
void for_all(Visit&& visit) {
    for (std::uint32_t number = 1; number <= block_count; ++number) visit(blocks[number]);
}

std::size_t used_bytes();
std::size_t cached_bytes();
void drop_all_free();  // returns the pages of all free blocks

// Ends the process with a message, without allocating memory.
[[noreturn]] void fail(const char* message);

}  // namespace ring::preload
