// The blocks of one rank's arena: which are free, which are in use, and which wait until no rank touches them.
//
// Freed blocks keep their pages as a reserve, because the kernel takes long to find and clear new ones; pages beyond
// the reserve go back to the machine. Destructors release blocks, so a release allocates nothing: the node of a block
// moves from one map to another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace ring {

class RingMemory;

// Bytes of freed memory whose pages a rank keeps where the machine has that much left. They serve blocks that live for
// one operation: between hosts the copies of ordinary tensors, of up to four buckets at RING_FUSION_THRESHOLD's
// default. Where memory is short nothing is kept, because another process may need it.
constexpr std::size_t kReserve = std::size_t{256} << 20;
constexpr std::size_t reserve_for(std::size_t left) { return left < 4 * kReserve ? 0 : kReserve; }

class Arena {
   public:
    // A condition for reusing a released block. It must not own the ring memory, which owns it.
    class Condition {
       public:
        virtual ~Condition() = default;
        virtual bool holds(RingMemory& ring_memory) noexcept = 0;
    };

    // `bytes` from `start` of the file; `rank` is the local rank, for messages.
    Arena(int fd, std::uint64_t start, std::size_t bytes, int rank);

    std::size_t bytes() const { return bytes_; }
    // Reserves the pages. Throws OutOfMemory. Does not block other calls.
    std::uint64_t allocate(std::size_t bytes);
    // Does nothing where no block in use begins at `offset`.
    void release(std::uint64_t offset) noexcept;
    // Keeps the block in use that `offset` lies in until the condition holds too. Does nothing for other memory.
    void keep(std::uint64_t offset, const std::shared_ptr<Condition>& until) noexcept;
    // Frees released blocks whose condition holds now.
    void reclaim(RingMemory& ring_memory) noexcept;
    // Gives all of the reserve back to the machine.
    void trim() noexcept;
    // Bytes that are not free.
    std::size_t allocated() const;

   private:
    struct Block {
        std::size_t bytes;
        std::shared_ptr<Condition> until;
    };
    using Blocks = std::map<std::uint64_t, Block>;  // by offset

    // Where a block of that size begins, and whether it has pages; kNoPlace where no free piece is large enough.
    struct Place {
        std::uint64_t begin;
        bool has_pages;
    };
    Place take(std::size_t bytes, std::size_t alignment);
    static Blocks::iterator find_fit(Blocks& blocks, std::size_t bytes, std::size_t alignment);
    void use(Blocks& from, Blocks::iterator block, std::uint64_t begin, std::size_t bytes);
    void reserve_pages(std::uint64_t begin, std::size_t bytes);
    void expect_room(std::size_t bytes);
    bool exceeds_reserve() noexcept;
    void give_back_excess() noexcept;
    void give_back(std::size_t kept) noexcept;
    Blocks::node_type cut_from_reserve(std::size_t bytes) noexcept;
    static void merge(Blocks& blocks, Blocks::node_type node) noexcept;
    void free(Blocks::node_type node) noexcept;

    int fd_;
    std::size_t bytes_;
    int rank_;

    std::mutex allocating_;  // held while the kernel reserves or frees pages
    std::size_t spare_ = 0;  // bytes that may be taken before the memory that is left is measured again
    std::int64_t looked_at_ = 0;

    mutable std::mutex mutex_;  // guards the rest; never held across a system call
    Blocks holes_;              // free, without pages: whole pages, neighbours merged
    Blocks reserve_;            // free, with pages; neighbours merged
    Blocks used_;
    Blocks released_;  // that wait for a condition
    std::size_t allocated_ = 0;
    std::size_t reserved_ = 0;  // bytes of `reserve_`

    std::atomic<std::size_t> most_kept_{kReserve};  // from the last measurement of the memory that is left
    std::atomic<std::int64_t> weighed_at_{0};
};

}  // namespace ring
