#include "ring/memory/arena.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"
#include "ring/memory/memory.hpp"
#include "ring/memory/memory_file.hpp"
#include "ring/memory/memory_left.hpp"
#include "ring/memory/sizes.hpp"

namespace ring {
namespace {

// How long a measurement of the free memory is valid, and which part of it further blocks may take.
constexpr std::int64_t kLookLasts = 1'000'000'000;  // ns
constexpr std::size_t kLookServes = 64;
// A reserve this small is kept without a measurement.
constexpr std::size_t kAlwaysKept = std::size_t{1} << 20;
constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};

// Two conditions of one block.
class Both : public Arena::Condition {
   public:
    Both(std::shared_ptr<Condition> first, std::shared_ptr<Condition> second)
        : first_(std::move(first)), second_(std::move(second)) {}
    bool holds(RingMemory& ring_memory) noexcept override {
        return first_->holds(ring_memory) && second_->holds(ring_memory);
    }

   private:
    std::shared_ptr<Condition> first_, second_;
};

}  // namespace

Arena::Arena(int fd, std::uint64_t start, std::size_t bytes, int rank) : fd_(fd), bytes_(bytes), rank_(rank) {
    holes_.emplace(start, Block{bytes, nullptr});
}

std::uint64_t Arena::allocate(std::size_t bytes) {
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), bytes < kPage ? 64 : kPage);
    const std::size_t alignment = size >= kHugePage ? kHugePage : size >= kPage ? kPage : 64;
    std::uint64_t begin = kNoPlace;
    {
        const std::lock_guard<std::mutex> one_at_a_time(allocating_);
        // Sums with a size that no arena has could overflow.
        Place place = bytes > bytes_ ? Place{kNoPlace, false} : take(size, alignment);
        if (place.begin == kNoPlace && bytes <= bytes_) {  // a piece with pages and one without may be enough together
            give_back(0);
            place = take(size, alignment);
        }
        begin = place.begin;
        if (begin == kNoPlace)
            throw OutOfMemory("ring memory: local rank " + std::to_string(rank_) + " needs " + gib_text(bytes) +
                              " in one piece; its arena of " + gib_text(bytes_) +
                              " (RING_MEMORY) has no such piece left.");
        if (!place.has_pages) reserve_pages(begin, size);
    }
    give_back_excess();  // blocks that other threads have released meanwhile
    return begin;
}

Arena::Place Arena::take(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto block = find_fit(reserve_, bytes, alignment); block != reserve_.end()) {
        const std::uint64_t begin = round_up(block->first, alignment);
        use(reserve_, block, begin, bytes);
        reserved_ -= bytes;
        return {begin, true};
    }
    const std::size_t pages = round_up(bytes, kPage);
    const auto block = find_fit(holes_, pages, std::max(alignment, kPage));
    if (block == holes_.end()) return {kNoPlace, false};
    const std::uint64_t begin = round_up(block->first, std::max(alignment, kPage));
    use(holes_, block, begin, pages);
    return {begin, false};
}

// The smallest piece that fits: the reserve has pieces of all sizes, usually also one of this size.
Arena::Blocks::iterator Arena::find_fit(Blocks& blocks, std::size_t bytes, std::size_t alignment) {
    auto best = blocks.end();
    for (auto block = blocks.begin(); block != blocks.end(); ++block)
        if (round_up(block->first, alignment) + bytes <= block->first + block->second.bytes &&
            (best == blocks.end() || block->second.bytes < best->second.bytes))
            best = block;
    return best;
}

void Arena::use(Blocks& from, Blocks::iterator block, std::uint64_t begin, std::size_t bytes) {
    const std::uint64_t end = block->first + block->second.bytes;
    Blocks parts;  // made before anything changes
    parts.emplace(begin, Block{bytes, nullptr});
    if (end > begin + bytes) parts.emplace(begin + bytes, Block{end - begin - bytes, nullptr});
    used_.insert(parts.extract(begin));
    if (begin > block->first) {
        block->second.bytes = begin - block->first;
    } else {
        from.erase(block);
    }
    from.merge(parts);
    allocated_ += bytes;
}

// For a block that `take` has cut out of a hole. The rest of its last page joins the reserve.
void Arena::reserve_pages(std::uint64_t begin, std::size_t bytes) {
    const std::size_t pages = round_up(bytes, kPage);
    try {
        Blocks rest;
        if (pages > bytes) rest.emplace(begin + bytes, Block{pages - bytes, nullptr});
        expect_room(pages);
        if (!reserve_room(fd_, static_cast<off_t>(begin), static_cast<off_t>(pages)))
            throw OutOfMemory("ring memory: local rank " + std::to_string(rank_) + " cannot reserve " +
                              gib_text(pages) + ": " + std::strerror(errno));
        if (rest.empty()) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        used_.find(begin)->second.bytes = bytes;
        allocated_ -= pages - bytes;
        reserved_ += pages - bytes;
        merge(reserve_, rest.extract(rest.begin()));
    } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex_);
        allocated_ -= pages;
        merge(holes_, used_.extract(begin));
        throw;
    }
}

// Measuring takes as long as a small operation (several files, 50 µs). So one measurement serves small blocks for a
// while, but only up to a small part of the memory that it found, because others may take memory meanwhile.
void Arena::expect_room(std::size_t bytes) {
    const std::int64_t now = monotonic_ns();
    if (bytes > spare_ || now > looked_at_ + kLookLasts) {
        std::size_t left = memory_left();
        if (bytes > left) {
            give_back(0);
            left = memory_left();
        }
        if (bytes > left)
            throw OutOfMemory("ring memory: local rank " + std::to_string(rank_) + " needs " + gib_text(bytes) +
                              " and the machine (or its memory limit) has " + gib_text(left) +
                              " left. Use a smaller model or fewer ranks, or free what you no longer need.");
        looked_at_ = now;
        spare_ = left / kLookServes;
    }
    spare_ -= std::min(spare_, bytes);
}

void Arena::release(std::uint64_t offset) noexcept {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        Blocks::node_type node = used_.extract(offset);
        if (node.empty()) return;
        if (node.mapped().until) {
            released_.insert(std::move(node));
        } else {
            free(std::move(node));
        }
    }
    give_back_excess();
}

void Arena::keep(std::uint64_t offset, const std::shared_ptr<Condition>& until) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = used_.upper_bound(offset);
    if (found == used_.begin() || offset >= (--found)->first + found->second.bytes) return;
    Block& block = found->second;
    if (!block.until) {
        block.until = until;
    } else if (block.until != until) {
        try {
            block.until = std::make_shared<Both>(block.until, until);
        } catch (const std::bad_alloc&) {
            used_.erase(found);  // the memory is lost, but never used by two blocks
        }
    }
}

void Arena::reclaim(RingMemory& ring_memory) noexcept {
    Blocks waiting;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting.swap(released_);
    }
    while (!waiting.empty()) {
        Blocks::node_type node = waiting.extract(waiting.begin());
        const bool is_free = node.mapped().until->holds(ring_memory);
        if (is_free) node.mapped().until.reset();
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_free) {
            free(std::move(node));
        } else {
            released_.insert(std::move(node));
        }
    }
}

void Arena::free(Blocks::node_type node) noexcept {
    allocated_ -= node.mapped().bytes;
    reserved_ += node.mapped().bytes;
    merge(reserve_, std::move(node));
}

void Arena::merge(Blocks& blocks, Blocks::node_type node) noexcept {
    const auto block = blocks.insert(std::move(node)).position;
    const auto after = std::next(block);
    if (after != blocks.end() && block->first + block->second.bytes == after->first) {
        block->second.bytes += after->second.bytes;
        blocks.erase(after);
    }
    if (block != blocks.begin()) {
        const auto before = std::prev(block);
        if (before->first + before->second.bytes == block->first) {
            before->second.bytes += block->second.bytes;
            blocks.erase(block);
        }
    }
}

void Arena::trim() noexcept {
    const std::lock_guard<std::mutex> one_at_a_time(allocating_);
    give_back(0);
}

bool Arena::exceeds_reserve() noexcept {
    std::size_t reserved = 0;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        reserved = reserved_;
    }
    if (reserved <= kAlwaysKept) return false;
    const std::int64_t now = monotonic_ns();
    if (now > weighed_at_.load(std::memory_order_relaxed) + kLookLasts) {
        try {
            most_kept_.store(reserve_for(memory_left()), std::memory_order_relaxed);
        } catch (const std::bad_alloc&) {
            most_kept_.store(0, std::memory_order_relaxed);
        }
        weighed_at_.store(now, std::memory_order_relaxed);
    }
    return reserved > std::max(kAlwaysKept, most_kept_.load(std::memory_order_relaxed));
}

// A thread that holds `allocating_` calls this before it returns, so that no other thread waits for the lock.
void Arena::give_back_excess() noexcept {
    if (!exceeds_reserve()) return;
    const std::unique_lock<std::mutex> one_at_a_time(allocating_, std::try_to_lock);
    if (one_at_a_time) give_back(most_kept_.load(std::memory_order_relaxed));
}

// Meanwhile the block is in neither map, and no thread can take it: that needs `allocating_`.
void Arena::give_back(std::size_t kept) noexcept {
    for (;;) {
        Blocks::node_type hole;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (reserved_ > kept) hole = cut_from_reserve(reserved_ - kept);
        }
        if (hole.empty()) return;
        int failed = 0;
        do {
            failed = fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(hole.key()),
                               static_cast<off_t>(hole.mapped().bytes));
        } while (failed != 0 && errno == EINTR);
        const std::lock_guard<std::mutex> lock(mutex_);
        merge(holes_, std::move(hole));
    }
}

// The last whole pages of the reserve, at most `bytes` rounded up; empty where there are none, or memory is short.
Arena::Blocks::node_type Arena::cut_from_reserve(std::size_t bytes) noexcept {
    for (auto block = reserve_.end(); block != reserve_.begin();) {
        --block;
        const std::uint64_t end = block->first + block->second.bytes;
        const std::uint64_t first = round_up(block->first, kPage);
        const std::uint64_t last = end / kPage * kPage;
        if (last <= first) continue;
        const std::size_t size = std::min<std::size_t>(last - first, round_up(bytes, kPage));
        Blocks hole, rest;
        try {
            hole.emplace(last - size, Block{size, nullptr});
            if (end > last) rest.emplace(last, Block{end - last, nullptr});
        } catch (const std::bad_alloc&) {
            return {};
        }
        block->second.bytes = last - size - block->first;
        if (block->second.bytes == 0) reserve_.erase(block);
        reserve_.merge(rest);
        reserved_ -= size;
        return hole.extract(hole.begin());
    }
    return {};
}

std::size_t Arena::allocated() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
}

}  // namespace ring
