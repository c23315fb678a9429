// Blocks that lie in ring memory, and how a fork preserves them.
//
// A fork copies private memory on write, but not shared memory. So before a fork the content of the promoted blocks
// that the program holds is copied to a file (a *snapshot*), and the child maps the file, copied on write, at their
// addresses. Children that are forked one after the other, like the workers of a data loader, share one snapshot. A
// child has no promoted blocks.
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
// Whether memory and mappings suffice for the snapshot of a fork now. Otherwise prints the reason to standard error.
bool can_fork();

// Call with the lock held. Replaces the block's ring memory, which goes back to its owner, by closed private memory.
// False where the process has no mapping left.
bool unmap_ring(Block& block);
// Call with the lock held, when memory or mappings are short for the block: others of its size are promoted after more
// collectives.
void promote_later(const Block& block);
// Call with the lock held, when the program may have changed its blocks: later children need a new snapshot.
void forget_snapshot();

}  // namespace ring::preload
