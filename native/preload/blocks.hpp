// The large blocks of one process: size classes in one range of addresses, and which free blocks keep their pages.
//
// Fixed terms. A block is *fresh* while it has no pages, *used* while the program holds it, and *cached* when it is
// free and keeps its pages. It is *private* memory, copied on write after a fork, or *promoted*: mapped from ring
// memory. A fresh block that was promoted is *closed*: nobody may touch it until it is used again. A free block is
// *stuck* while it is mapped from ring memory that others may write to, because the process has no mapping left to take
// its place (`vm.max_map_count`).
//
// A block has the size of its class for good; classes are 1/16 apart, so at most 6 % of a block are wasted. Free blocks
// keep their pages as long as all blocks together stay below the most that the program has used lately, 1/16 of that
// and 16 MiB: so it takes hardly more memory than it had needed anyway. Beyond that the private blocks that were freed
// first lose theirs, then promoted ones.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

#include "ring/memory/preload_table.hpp"

namespace ring::preload {

constexpr std::size_t kGranule = std::size_t{16} << 10;  // every block begins and ends at a multiple
constexpr int kSteps = 16;                               // classes from one power of two to the next
constexpr int kClasses = 23 * kSteps;
constexpr std::uint64_t kPrivate = ~std::uint64_t{0};  // in the place of an offset in ring memory
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

// Guards all that follows. Taken before a fork, so that the child finds everything in order.
extern pthread_mutex_t lock;
// Guards the moment in which a block is neither private nor promoted; taken before `lock`.
extern pthread_mutex_t promoting;

// Where blocks lie; none while `span()` is 0.
extern char* base;
extern std::size_t span_bytes;
inline std::size_t span() { return __atomic_load_n(&span_bytes, __ATOMIC_ACQUIRE); }
inline bool is_ours(const void* address) {
    const std::size_t bytes = span();  // before `base`, which stands when this does
    return bytes != 0 && static_cast<std::size_t>(static_cast<const char*>(address) - base) < bytes;
}

bool activate();
// Null where it has no block for that; then the C library may.
void* take(std::size_t bytes);
void give(void* address);
// The block that begins there; ends the process where none does, as a C library does for such a `free`.
Block& expect_block(const void* address);
std::size_t size_of(const Block& block);
// The block that the address lies in; null where it lies in none.
Block* find_block(const void* address);
// Gives the pages of a cached or stuck block back. False where it stays what it is, as the system has no mapping left.
bool drop_pages(Block& block);
// For a cached block that nobody may use again before its pages are dropped: it is stuck.
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
void drop_all_free();  // gives the pages of all of them back

// Ends the process with a message; no memory is needed for that.
[[noreturn]] void fail(const char* message);

}  // namespace ring::preload
