#include "ring/memory/arena.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"
#include "ring/memory/memory.hpp"
#include "ring/memory/memory_left.hpp"
#include "ring/memory/sizes.hpp"

namespace ring {
namespace {

// For how long, and for which part of it, a look at the memory that is left lets further blocks through.
constexpr std::int64_t kLookLasts = 1'000'000'000;  // ns
constexpr std::size_t kLookServes = 64;

// Two conditions of one block.
class Both : public Arena::Condition {
   public:
    Both(std::shared_ptr<Condition> first, std::shared_ptr<Condition> second)
        : first_(std::move(first)), second_(std::move(second)) {}
    bool holds(Domain& domain) noexcept override { return first_->holds(domain) && second_->holds(domain); }

   private:
    std::shared_ptr<Condition> first_, second_;
};

}  // namespace

Arena::Arena(int fd, std::uint64_t start, std::size_t bytes, int rank) : fd_(fd), bytes_(bytes), rank_(rank) {
    free_.emplace(start, Block{bytes, nullptr});
}

std::uint64_t Arena::allocate(std::size_t bytes) {
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), bytes < kPage ? 64 : kPage);
    const std::size_t alignment = size >= kHugePage ? kHugePage : size >= kPage ? kPage : 64;
    const std::lock_guard<std::mutex> one_at_a_time(allocating_);
    const std::uint64_t begin = take(size, alignment);
    try {
        expect_room(size);
        int failed = 0;
        do {
            failed = fallocate(fd_, 0, static_cast<off_t>(begin), static_cast<off_t>(size));
        } while (failed != 0 && errno == EINTR);
        if (failed != 0)
            throw OutOfMemory("ring memory: local rank " + std::to_string(rank_) + " cannot reserve " + gib_text(size) +
                              ": " + std::strerror(errno));
    } catch (...) {
        release(begin);
        throw;
    }
    return begin;
}

std::uint64_t Arena::take(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = free_.begin(); block != free_.end(); ++block) {
        const std::uint64_t begin = round_up(block->first, alignment);
        const std::uint64_t end = block->first + block->second.bytes;
        if (begin + bytes > end) continue;
        Blocks parts;  // made before anything changes
        parts.emplace(begin, Block{bytes, nullptr});
        if (end > begin + bytes) parts.emplace(begin + bytes, Block{end - begin - bytes, nullptr});
        used_.insert(parts.extract(begin));
        if (begin > block->first) {
            block->second.bytes = begin - block->first;
        } else {
            free_.erase(block);
        }
        free_.merge(parts);
        allocated_ += bytes;
        return begin;
    }
    throw OutOfMemory("ring memory: local rank " + std::to_string(rank_) + " needs " + gib_text(bytes) +
                      " in one piece; its arena of " + gib_text(bytes_) + " (RING_MEMORY) has no such piece left.");
}

// A look takes as long as a small operation (several files, 50 µs). So one that found plenty serves small blocks for a
// while; what else takes memory meanwhile is not seen, hence only a small part of what there was.
void Arena::expect_room(std::size_t bytes) {
    const std::int64_t now = monotonic_ns();
    if (bytes > spare_ || now > looked_at_ + kLookLasts) {
        std::size_t left = memory_left();
        if (bytes > left) {
            punch_free();
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
    const std::lock_guard<std::mutex> lock(mutex_);
    Blocks::node_type node = used_.extract(offset);
    if (node.empty()) return;
    if (node.mapped().until) {
        released_.insert(std::move(node));
    } else {
        merge_free(std::move(node));
    }
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
            used_.erase(found);  // nobody gets it any more: lost, but never written by two
        }
    }
}

void Arena::reclaim(Domain& domain) noexcept {
    Blocks waiting;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting.swap(released_);
    }
    while (!waiting.empty()) {
        Blocks::node_type node = waiting.extract(waiting.begin());
        const bool is_free = node.mapped().until->holds(domain);
        if (is_free) node.mapped().until.reset();
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_free) {
            merge_free(std::move(node));
        } else {
            released_.insert(std::move(node));
        }
    }
}

void Arena::merge_free(Blocks::node_type node) noexcept {
    allocated_ -= node.mapped().bytes;
    const auto block = free_.insert(std::move(node)).position;
    const auto after = std::next(block);
    if (after != free_.end() && block->first + block->second.bytes == after->first) {
        block->second.bytes += after->second.bytes;
        free_.erase(after);
    }
    if (block != free_.begin()) {
        const auto before = std::prev(block);
        if (before->first + before->second.bytes == block->first) {
            before->second.bytes += block->second.bytes;
            free_.erase(block);
        }
    }
}

void Arena::trim() {
    const std::lock_guard<std::mutex> one_at_a_time(allocating_);
    punch_free();
}

// Nothing is taken out of `free_` meanwhile: that needs `allocating_`.
void Arena::punch_free() {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> holes;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [offset, block] : free_)
            holes.emplace_back(round_up(offset, kPage), (offset + block.bytes) / kPage * kPage);
    }
    for (const auto& [begin, end] : holes)
        if (end > begin)
            fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                      static_cast<off_t>(end - begin));
}

std::size_t Arena::allocated() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
}

}  // namespace ring
