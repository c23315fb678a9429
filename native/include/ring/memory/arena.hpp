// The blocks of one rank's arena: which are free, which are in use, and which wait until no rank touches them.
//
// Destructors release blocks, so a release takes no memory: the node of a block moves from one map to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace ring {

class Domain;

class Arena {
   public:
    // What has to hold before a block that was released is given out again. It must not own the domain, which owns it.
    class Condition {
       public:
        virtual ~Condition() = default;
        virtual bool holds(Domain& domain) noexcept = 0;
    };

    // `bytes` from `start` of the file; `rank` is the local rank, for messages.
    Arena(int fd, std::uint64_t start, std::size_t bytes, int rank);

    std::size_t bytes() const { return bytes_; }
    // Reserves the pages. Throws OutOfMemory. Other calls do not wait for this one.
    std::uint64_t allocate(std::size_t bytes);
    // Does nothing where no block in use begins at `offset`.
    void release(std::uint64_t offset) noexcept;
    // Keeps the block in use that `offset` lies in until the condition holds too. Does nothing for other memory.
    void keep(std::uint64_t offset, const std::shared_ptr<Condition>& until) noexcept;
    // Frees what was released and kept, where the condition holds by now.
    void reclaim(Domain& domain) noexcept;
    // Gives the pages of free blocks back to the machine.
    void trim();
    // Bytes that are not free.
    std::size_t allocated() const;

   private:
    struct Block {
        std::size_t bytes;
        std::shared_ptr<Condition> until;
    };
    using Blocks = std::map<std::uint64_t, Block>;  // by offset

    std::uint64_t take(std::size_t bytes, std::size_t alignment);
    void expect_room(std::size_t bytes);
    void punch_free();
    void merge_free(Blocks::node_type node) noexcept;

    int fd_;
    std::size_t bytes_;
    int rank_;

    std::mutex allocating_;  // held while the kernel reserves or frees pages
    std::size_t spare_ = 0;  // bytes that need no look at what memory is left
    std::int64_t looked_at_ = 0;

    mutable std::mutex mutex_;  // of what follows; never held across a system call
    Blocks free_;               // neighbours are merged
    Blocks used_;
    Blocks released_;  // and kept
    std::size_t allocated_ = 0;
};

}  // namespace ring
