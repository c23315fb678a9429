#include "promotion.hpp"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ring/memory/memory_file.hpp"

namespace ring::preload {
namespace {

// Each block is a mapping of its own; a process may have 65530 mappings.
constexpr std::size_t kMostPromoted = 16384;  // blocks
// The number of collectives of one size after which blocks of that size are promoted: a copy for a single reduction
// does not pay. It doubles each time that memory is too short to keep one, so that copies never cost more than they
// save.
constexpr std::uint32_t kFirstAt = 2;
constexpr std::uint32_t kLastAt = 1 << 20;
struct Claims {
    std::uint32_t count, needed;
};

PromotionSource source{-1, nullptr, nullptr, nullptr};
std::size_t promoted = 0;  // blocks
Claims claims[kClasses];

int snapshot = -1;
std::size_t snapshot_bytes = 0;
bool snapshot_failed = false;

bool is_shared_with_others(const Block& block) { return block.ring != kPrivate; }

void become_private(Block& block) {
    __atomic_store_n(&block.ring, kPrivate, __ATOMIC_RELEASE);
    block.retired = false;
    --promoted;
}

// A refused mapping leaves the old one in place, unless the kernel lacks memory for its own structures.
bool is_mapped(const Block& block) { return msync(block.data, size_of(block), MS_ASYNC) == 0; }

// Keeps a block private because no mapping is left for it; its content is at `place`.
void stay_private(Block& block, const void* place) {
    if (!is_mapped(block)) {
        if (mmap(block.data, size_of(block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            fail("the system has unmapped a tensor and has no memory to map it again\n");
        memcpy(block.data, place, block.requested);
    }
    pthread_mutex_lock(&lock);
    --promoted;
    promote_later(block);
    pthread_mutex_unlock(&lock);
}

// Marks a block whose ring memory this process must not return any more.
void orphan(Block& block) {
    if (block.state != Block::State::Used && drop_pages(block)) return;
    if (block.state == Block::State::Cached) set_aside(block);
    __atomic_store_n(&block.ring, kOrphaned, __ATOMIC_RELEASE);
}

// Whether the process can have `more` further mappings.
bool can_map(std::size_t more) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    char* range =
        static_cast<char*>(mmap(nullptr, more * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (range == MAP_FAILED) return false;
    bool granted = true;
    for (std::size_t at = 1; granted && at < more; at += 2) granted = mprotect(range + at * page, page, PROT_READ) == 0;
    munmap(range, more * page);
    return granted;
}

bool write_all(const Block& block, std::size_t at) {
    for (std::size_t done = 0; done < size_of(block);) {
        const ssize_t wrote = pwrite(snapshot, block.data + done, size_of(block) - done, static_cast<off_t>(at + done));
        if (wrote < 0 && errno != EINTR) return false;
        if (wrote > 0) done += static_cast<std::size_t>(wrote);
    }
    return true;
}

bool is_same(const Block& block, std::size_t at) {
    static char part[std::size_t{64} << 10];
    for (std::size_t done = 0; done < size_of(block); done += sizeof part) {
        const std::size_t bytes = size_of(block) - done < sizeof part ? size_of(block) - done : sizeof part;
        if (pread(snapshot, part, bytes, static_cast<off_t>(at + done)) != static_cast<ssize_t>(bytes) ||
            memcmp(part, block.data + done, bytes) != 0)
            return false;
    }
    return true;
}

// Visits the blocks whose content a child needs, each with its offset in the snapshot, and returns their bytes. Stops
// early where `visit` returns false.
template <class Visit>
std::size_t for_held(Visit&& visit) {
    std::size_t at = 0;
    bool more = true;
    for_all([&](Block& block) {
        if (!more || block.state != Block::State::Used || !is_shared_with_others(block)) return;
        more = visit(block, at);
        at += size_of(block);
    });
    return at;
}

bool snapshot_holds() {
    if (snapshot < 0 || for_held([](Block&, std::size_t) { return true; }) != snapshot_bytes) return false;
    bool same = true;
    for_held([&](Block& block, std::size_t at) { return same = is_same(block, at); });
    return same;
}

void before_fork() {
    pthread_mutex_lock(&promoting);
    pthread_mutex_lock(&lock);
    snapshot_failed = false;
    if (promoted == 0 || snapshot_holds()) return;
    forget_snapshot();
    const std::size_t bytes = for_held([](Block&, std::size_t) { return true; });
    if (bytes == 0) return;
    snapshot = memory_file("ring_fork", bytes);
    snapshot_bytes = bytes;
    snapshot_failed = snapshot < 0;
    for_held([&](Block& block, std::size_t at) {
        if (!snapshot_failed) snapshot_failed = !write_all(block, at);
        return !snapshot_failed;
    });
    if (snapshot_failed) forget_snapshot();
}

void in_parent() {
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&promoting);
}

void in_child() {
    if (snapshot_failed) {
        constexpr char kWhy[] =
            "ring_notebook's allocator: no memory for the copy of the tensors that a forked process needs; fork before "
            "training begins, or set RING_ALLOCATOR=system\n";
        _exit(write(2, kWhy, sizeof kWhy - 1) < 0 ? 126 : 127);
    }
    for_held([](Block& block, std::size_t at) {
        if (mmap(block.data, size_of(block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, snapshot,
                 static_cast<off_t>(at)) == MAP_FAILED)
            fail("a forked process cannot map its copy of a tensor\n");
        become_private(block);
        return true;
    });
    forget_snapshot();
    source = {-1, nullptr, nullptr, nullptr};  // ring memory belongs to the parent
    for_all([](Block& block) {
        if (is_shared_with_others(block)) orphan(block);
    });
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&promoting);
}

}  // namespace

bool attach(const PromotionSource* from) {
    static bool listening = false;
    pthread_mutex_lock(&lock);
    const bool is_free = source.owner == nullptr && span() != 0;
    const bool is_first = is_free && !listening;
    if (is_first) listening = true;
    if (is_free) source = *from;
    pthread_mutex_unlock(&lock);
    if (is_first && pthread_atfork(before_fork, in_parent, in_child) != 0) {
        detach(from->owner);
        return false;
    }
    return is_free;
}

void detach(void* owner) {
    pthread_mutex_lock(&promoting);
    pthread_mutex_lock(&lock);
    if (source.owner == owner) {
        for_all([](Block& block) {
            if (is_shared_with_others(block)) orphan(block);
        });
        source = {-1, nullptr, nullptr, nullptr};
    }
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&promoting);
}

std::uint64_t offset_of(const void* address, std::size_t bytes) {
    const Block* block = find_block(address);
    if (block == nullptr) return kPrivate;
    const std::uint64_t ring = __atomic_load_n(&block->ring, __ATOMIC_ACQUIRE);
    const auto inside = static_cast<std::size_t>(static_cast<const char*>(address) - block->data);
    if (ring >= kOrphaned || inside + bytes > size_of(*block)) return kPrivate;
    return ring + inside;
}

std::size_t claim(const void* address, std::size_t bytes) {
    std::size_t needed = 0;
    pthread_mutex_lock(&lock);
    Block* block = find_block(address);
    if (block != nullptr && source.owner != nullptr && block->state == Block::State::Used && block->data == address &&
        bytes == block->requested) {
        Claims& all = claims[block->size_class];
        if (all.needed == 0) all.needed = kFirstAt;
        if (all.count < all.needed) ++all.count;
        if (all.count == all.needed && block->ring == kPrivate && promoted < kMostPromoted) needed = size_of(*block);
    }
    pthread_mutex_unlock(&lock);
    return needed;
}

bool promote(const void* address, std::uint64_t offset, void* place) {
    pthread_mutex_lock(&promoting);
    pthread_mutex_lock(&lock);
    Block* block = find_block(address);
    const int fd = source.fd;
    const bool fits = block != nullptr && fd >= 0 && block->data == address && block->state == Block::State::Used &&
                      block->ring == kPrivate;
    if (fits) ++promoted;
    pthread_mutex_unlock(&lock);
    bool moved = false;
    if (fits) {
        // The caller's collective owns the block: no thread writes to it, and threads that read it may continue.
        memcpy(place, block->data, block->requested);
        moved = mmap(block->data, size_of(*block), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                     static_cast<off_t>(offset)) != MAP_FAILED;
        if (moved) {
            __atomic_store_n(&block->ring, offset, __ATOMIC_RELEASE);
        } else {
            stay_private(*block, place);
        }
    }
    pthread_mutex_unlock(&promoting);
    return moved;
}

void retire(std::uint64_t offset) {
    pthread_mutex_lock(&lock);
    for_all([&](Block& block) {
        if (block.ring < kOrphaned && offset >= block.ring && offset < block.ring + size_of(block))
            block.retired = true;
    });
    pthread_mutex_unlock(&lock);
}

std::size_t promoted_bytes() {
    std::size_t bytes = 0;
    for_all([&](Block& block) {
        if (is_shared_with_others(block)) bytes += size_of(block);
    });
    return bytes;
}

bool can_fork() {
    pthread_mutex_lock(&lock);
    const std::size_t bytes = promoted == 0 ? 0 : for_held([](Block&, std::size_t) { return true; });
    const std::size_t replaced = snapshot < 0 ? 0 : snapshot_bytes;
    const auto memory_left = source.memory_left;
    std::size_t between = 0;  // free blocks between those that the child maps, which split its mappings
    for_all(
        [&](Block& block) { between += block.state != Block::State::Used && is_shared_with_others(block) ? 1 : 0; });
    pthread_mutex_unlock(&lock);
    constexpr char kMemory[] =
        "ring_notebook's allocator: this process cannot be forked, because there is no memory left for a copy of its "
        "tensors; fork before training begins, or set RING_ALLOCATOR=system\n";
    constexpr char kMappings[] =
        "ring_notebook's allocator: this process cannot be forked, because it has as many mappings as it may "
        "(vm.max_map_count); raise that, or set RING_ALLOCATOR=system\n";
    const auto refuse = [](const char* why, std::size_t length) {
        if (write(2, why, length) < 0) errno = 0;  // standard error is closed
        return false;
    };
    if (bytes > replaced && memory_left != nullptr && bytes - replaced > memory_left())
        return refuse(kMemory, sizeof kMemory - 1);
    return bytes == 0 || can_map(2 * between + 8) || refuse(kMappings, sizeof kMappings - 1);
}

bool unmap_ring(Block& block) {
    const std::uint64_t offset = block.ring;
    // Map it without access: with access the system would have to commit memory, which can fail without overcommit.
    if (mmap(block.data, size_of(block), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        return false;
    block.closed = true;
    become_private(block);
    if (offset < kOrphaned && source.give_back != nullptr) source.give_back(source.owner, offset);
    return true;
}

void promote_later(const Block& block) {
    Claims& all = claims[block.size_class];
    all.count = 0;
    if (all.needed < kLastAt) all.needed *= 2;
}

void forget_snapshot() {
    if (snapshot < 0) return;
    close(snapshot);
    snapshot = -1;
}

}  // namespace ring::preload
