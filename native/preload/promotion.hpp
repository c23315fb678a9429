// Blocks that lie in ring memory, and what becomes of them when the process forks.
//
// A fork copies private memory on write; shared memory it does not. So before a fork the content of the promoted blocks
// that the program holds is copied to a file of its own (a *snapshot*), and the child maps that, copied on write, in
// their places. Children that are forked one after the other, as the workers of a data loader, share one snapshot. In
// the child no block is promoted any more.
#pragma once

#include "blocks.hpp"

namespace ring::preload {

bool attach(const PromotionSource* source);
void detach(void* owner);
std::uint64_t offset_of(const void* address, std::size_t bytes);
std::size_t claim(const void* address, std::size_t bytes);
bool promote(const void* address, std::uint64_t offset, void* place);
void retire(std::uint64_t offset);
std::size_t promoted_bytes();
// Whether there are memory and mappings for the snapshot that a fork takes now. Where there are none, says so on
// standard error.
bool can_fork();

// With the lock held: puts closed private memory in the place of ring memory, which goes back to its owner. False where
// the process has no mapping left for that.
bool unmap_ring(Block& block);
// With the lock held: memory or mappings are too short for the block, so others of its size are promoted after more
// collectives.
void promote_later(const Block& block);
// With the lock held: the program has gone on, and children that come later will see something else.
void forget_snapshot();

}  // namespace ring::preload
