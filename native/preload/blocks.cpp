#include "blocks.hpp"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "promotion.hpp"

namespace ring::preload {

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t promoting = PTHREAD_MUTEX_INITIALIZER;
char* base = nullptr;
std::size_t span_bytes = 0;
Block* blocks = nullptr;
std::uint32_t block_count = 0;

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Address space for each byte of memory: a class never uses the blocks of another class, even when it has many free.
constexpr std::size_t kSpread = 8;
constexpr std::size_t kLeastSpan = std::size_t{4} << 30;
constexpr std::size_t kMostSpan = std::size_t{8} << 40;
constexpr std::size_t kMostBlock = std::size_t{1} << 40;
// The peak of the program's use is taken over the last one to two windows.
constexpr std::int64_t kWindow = 30;  // seconds
// A small part of the memory that a process with a framework takes before it has a model.
constexpr std::size_t kSlack = std::size_t{16} << 20;

// A list of blocks by number; the newest is taken first.
struct List {
    std::uint32_t newest = 0;
};

struct SizeClass {
    List fresh, cached_private, cached_promoted;
};

// Addresses that are not part of a block yet; `ready` bytes of them may be accessed.
struct Frontier {
    char *at, *ready, *end;
};

SizeClass classes[kClasses];
Frontier small_blocks, large_blocks;
std::uint32_t* owner_of = nullptr;  // of each granule: the number of its block
// Cached blocks by age. Promoted blocks are the last to lose their pages: a new promotion costs a copy.
struct Ages {
    std::uint32_t oldest, newest;
};
Ages private_ages, promoted_ages;
std::size_t used = 0, cached = 0;
std::size_t peaks[2] = {0, 0};  // of `used`, in the last window and in this one
std::int64_t window_began = 0;

constexpr std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

int class_of(std::size_t bytes) {
    const int power = 63 - __builtin_clzll(bytes - 1);  // bytes are above 2^power, up to twice that
    const std::size_t step = (std::size_t{1} << power) / kSteps;
    const auto steps = static_cast<int>((bytes - 1 - (std::size_t{1} << power)) / step);
    return (power - 18) * kSteps + steps + 1;
}

std::size_t class_bytes(int number) {
    const std::size_t power = std::size_t{1} << ((number - 1) / kSteps + 18);
    return power + power / kSteps * (static_cast<std::size_t>((number - 1) % kSteps) + 1);
}

List& list_of(const Block& block) {
    SizeClass& all = classes[block.size_class];
    if (block.state == Block::State::Fresh) return all.fresh;
    return block.ring == kPrivate ? all.cached_private : all.cached_promoted;
}

Ages& ages_of(const Block& block) { return block.ring == kPrivate ? private_ages : promoted_ages; }

std::uint32_t number_of(const Block& block) { return static_cast<std::uint32_t>(&block - blocks); }

void insert(Block& block) {
    List& list = list_of(block);
    block.previous = 0;
    block.next = list.newest;
    if (list.newest != 0) blocks[list.newest].previous = number_of(block);
    list.newest = number_of(block);
    if (block.state != Block::State::Cached) return;
    Ages& ages = ages_of(block);
    block.newer = 0;
    block.older = ages.newest;
    (ages.newest != 0 ? blocks[ages.newest].newer : ages.oldest) = number_of(block);
    ages.newest = number_of(block);
    cached += size_of(block);
}

void remove(Block& block) {
    (block.previous != 0 ? blocks[block.previous].next : list_of(block).newest) = block.next;
    if (block.next != 0) blocks[block.next].previous = block.previous;
    if (block.state != Block::State::Cached) return;
    Ages& ages = ages_of(block);
    (block.older != 0 ? blocks[block.older].newer : ages.oldest) = block.newer;
    (block.newer != 0 ? blocks[block.newer].older : ages.newest) = block.older;
    cached -= size_of(block);
}

std::int64_t seconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return now.tv_sec;
}

void note_use() {
    const std::int64_t now = seconds();
    if (now >= window_began + kWindow) {
        peaks[0] = now >= window_began + 2 * kWindow ? 0 : peaks[1];
        peaks[1] = 0;
        window_began = now;
    }
    if (used > peaks[1]) peaks[1] = used;
}

std::size_t most_bytes() {
    const std::size_t peak = peaks[0] > peaks[1] ? peaks[0] : peaks[1];
    return peak + peak / 16 + kSlack;
}

void* reserve(std::size_t bytes, int access) {
    void* memory = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

// Cuts a new block; null where no addresses are left.
Block* cut(int number) {
    const std::size_t size = class_bytes(number);
    Frontier& frontier = size >= kHugePage ? large_blocks : small_blocks;
    const std::size_t alignment = size >= kHugePage ? kHugePage : kGranule;
    char* data = base + round_up(static_cast<std::size_t>(frontier.at - base), alignment);
    if (size > static_cast<std::size_t>(frontier.end - data)) return nullptr;
    if (data + size > frontier.ready) {
        constexpr std::size_t kAhead = std::size_t{16} << 20;
        std::size_t more = round_up(static_cast<std::size_t>(data + size - frontier.ready), kAhead);
        const auto most = static_cast<std::size_t>(frontier.end - frontier.ready);
        if (more > most) more = most;
        if (mprotect(frontier.ready, more, PROT_READ | PROT_WRITE) != 0) return nullptr;
        frontier.ready += more;
    }
    frontier.at = data + size;
    Block& block = blocks[++block_count];
    block.ring = kPrivate;
    block.data = data;
    block.size_class = static_cast<std::uint16_t>(number);
    const auto first = static_cast<std::size_t>(data - base) / kGranule;
    for (std::size_t granule = first; granule < first + size / kGranule; ++granule) owner_of[granule] = block_count;
    block.state = Block::State::Fresh;
    insert(block);
    return &block;
}

void keep_below(std::size_t most) {
    while (private_ages.oldest != 0 && used + cached > most) drop_pages(blocks[private_ages.oldest]);
    while (promoted_ages.oldest != 0 && used + cached > most) {
        Block& block = blocks[promoted_ages.oldest];
        if (most > 0) promote_later(block);
        if (!drop_pages(block)) return;  // the next tensor of its size gets it
    }
}

// Gives the program access to the block.
bool open_block(Block& block) {
    if (block.closed) block.closed = mprotect(block.data, size_of(block), PROT_READ | PROT_WRITE) != 0;
    return !block.closed;
}

}  // namespace

std::size_t size_of(const Block& block) { return class_bytes(block.size_class); }
std::size_t used_bytes() { return used; }
std::size_t cached_bytes() { return cached; }

bool activate() {
    pthread_mutex_lock(&lock);
    if (span() == 0) {
        const auto memory =
            static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
        std::size_t bytes = memory > kMostSpan / kSpread ? kMostSpan : round_up(memory * kSpread, kHugePage);
        char* range = nullptr;
        for (; bytes >= kLeastSpan && range == nullptr; bytes /= 2) {
            range = static_cast<char*>(reserve(bytes + kHugePage, PROT_NONE));
            if (range != nullptr) break;
        }
        if (range != nullptr) {
            const std::size_t granules = bytes / kGranule;
            owner_of = static_cast<std::uint32_t*>(reserve(granules * sizeof *owner_of, PROT_READ | PROT_WRITE));
            blocks = static_cast<Block*>(reserve((bytes / kLeastBlock + 1) * sizeof *blocks, PROT_READ | PROT_WRITE));
            if (owner_of != nullptr && blocks != nullptr) {
                base = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(range), kHugePage));
                char* middle = base + round_up(bytes / 4, kHugePage);
                small_blocks = {base, base, middle};
                large_blocks = {middle, middle, base + bytes};
                __atomic_store_n(&span_bytes, bytes, __ATOMIC_RELEASE);
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return span() != 0;
}

void* take(std::size_t bytes) {
    if (bytes < kLeastBlock || bytes > kMostBlock) return nullptr;
    const int number = bytes == kLeastBlock ? 0 : class_of(bytes);
    pthread_mutex_lock(&lock);
    forget_snapshot();
    SizeClass& all = classes[number];
    // Promoted blocks first: collectives have worked on tensors of this size.
    const std::uint32_t kept = all.cached_promoted.newest != 0 ? all.cached_promoted.newest : all.cached_private.newest;
    Block* block = kept != 0 ? &blocks[kept] : all.fresh.newest != 0 ? &blocks[all.fresh.newest] : cut(number);
    if (block != nullptr && !open_block(*block)) block = nullptr;
    if (block != nullptr) {
        remove(*block);
        block->state = Block::State::Used;
        block->requested = bytes;
        used += size_of(*block);
        note_use();
        keep_below(most_bytes());
    }
    pthread_mutex_unlock(&lock);
    return block != nullptr ? block->data : nullptr;
}

void give(void* address) {
    pthread_mutex_lock(&lock);
    Block& block = expect_block(address);
    used -= size_of(block);
    block.state = Block::State::Cached;
    insert(block);
    if (block.ring != kPrivate) forget_snapshot();
    if ((block.ring == kOrphaned || block.retired) && !drop_pages(block)) set_aside(block);
    note_use();
    keep_below(most_bytes());
    pthread_mutex_unlock(&lock);
}

Block* find_block(const void* address) {
    if (!is_ours(address)) return nullptr;
    const std::uint32_t number = __atomic_load_n(
        &owner_of[static_cast<std::size_t>(static_cast<const char*>(address) - base) / kGranule], __ATOMIC_RELAXED);
    return number == 0 ? nullptr : &blocks[number];
}

Block& expect_block(const void* address) {
    Block* block = find_block(address);
    if (block == nullptr || block->data != address || block->state != Block::State::Used)
        fail("free() or realloc() of an address that is not an allocated block\n");
    return *block;
}

bool drop_pages(Block& block) {
    const bool was_stuck = block.state == Block::State::Stuck;
    if (!was_stuck) remove(block);
    bool dropped = true;
    if (block.ring == kPrivate) {
        madvise(block.data, size_of(block), MADV_DONTNEED);
    } else {
        dropped = unmap_ring(block);
    }
    if (dropped) block.state = Block::State::Fresh;
    if (dropped || !was_stuck) insert(block);
    return dropped;
}

void set_aside(Block& block) {
    remove(block);
    block.state = Block::State::Stuck;
}

void drop_all_free() {
    keep_below(0);
    for_all([](Block& block) {
        if (block.state == Block::State::Stuck) drop_pages(block);
    });
}

void fail(const char* message) {
    constexpr char kWho[] = "ring_notebook's allocator: ";
    if (write(2, kWho, sizeof kWho - 1) < 0 || write(2, message, strlen(message)) < 0) abort();
    abort();
}

}  // namespace ring::preload
