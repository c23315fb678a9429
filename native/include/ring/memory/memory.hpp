// Ring memory: one memfd that every rank of a host maps.
//
//   | control page(s): RingMemoryHeader, RankSlot per rank | arena of rank 0 | arena of rank 1 | ...
//
// The file is sparse: an arena is as large as the machine's memory and takes pages only where a rank has allocated.
// A place in ring memory is an offset from the start of the file, the same number for every rank; each process adds
// its own base. The file has no name, so no other user can open it and nothing is left when the last process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/base/shared_atomic.hpp"
#include "ring/base/wait.hpp"
#include "ring/memory/arena.hpp"
#include "ring/memory/sizes.hpp"

namespace ring {

constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
// Instead of an offset: the block is closed, no rank may enter it any more.
constexpr std::uint64_t kClosed = kNowhere - 1;
// Instead of an offset: a rank is about to reserve the block.
constexpr std::uint64_t kClaimed = kNowhere - 2;
// Words of 64 processors each; Linux supports at most 8192 processors on x86-64.
constexpr std::size_t kCoreWords = 128;

// What one rank shows to the other ranks of its host during its lifetime.
struct alignas(128) RankSlot {
    Doorbell bell;
    SharedAtomic<std::int64_t> pid{0};
    SharedAtomic<std::uint64_t> began{0};  // start time of its process, because a later one may get the same pid
    // The generation that this rank leads, and the offset of its group block.
    SharedAtomic<std::uint64_t> generation{0};
    SharedAtomic<std::uint64_t> generation_block{kNowhere};
    // The block that this rank is about to use; its owner does not free it meanwhile.
    SharedAtomic<std::uint64_t> entering{kNowhere};
    // The last generation that this rank has given up before it joined it.
    SharedAtomic<std::uint64_t> given_up{0};
    // The run that this rank has left: it joins no further generation of that run.
    SharedAtomic<std::uint64_t> left_run{0};
    // For agree_on_generation: the oldest generation that this rank accepts while it waits for one; 0 when it does not
    // wait.
    SharedAtomic<std::uint64_t> wants{0};
    // The newest generation whose leader counts on this rank, and the newest one that this rank has decided on as a
    // leader.
    SharedAtomic<std::uint64_t> invited{0};
    SharedAtomic<std::uint64_t> decided{0};
    // The processors that the rank may run on, one bit each.
    SharedAtomic<std::uint64_t> cores[kCoreWords] = {};
};

class RingMemory {
   public:
    // The creator sends `pid`, `fd` and `token` to the other ranks by any means (MPI, inheritance). `arena` is the most
    // that one rank may allocate, in bytes; 0 means the machine's memory.
    static std::shared_ptr<RingMemory> create(int local_rank, int local_size, std::size_t arena = 0);
    static std::shared_ptr<RingMemory> attach(int local_rank, int local_size, std::int64_t pid, int fd,
                                              std::uint64_t token);
    // For another rank of this process, which runs as a thread: shares the mapping, so that addresses are the same for
    // both. Throws Error for this rank itself.
    std::shared_ptr<RingMemory> share(int local_rank) const;
    ~RingMemory();
    RingMemory(const RingMemory&) = delete;
    RingMemory& operator=(const RingMemory&) = delete;

    int local_rank() const { return local_rank_; }
    int local_size() const { return local_size_; }
    int fd() const { return mapping_->fd; }
    std::uint64_t token() const { return token_; }

    RankSlot& slot(int rank) const;
    // Whether that rank's `left_run` says that it joins no further generation of this run. False for run 0.
    bool has_left_run(int rank, std::uint64_t run) const {
        return run != 0 && slot(rank).left_run.load(std::memory_order_seq_cst) == run;
    }
    template <class T = void>
    T* at(std::uint64_t offset) const {
        return reinterpret_cast<T*>(mapping_->base + offset);
    }
    // Whether `bytes` at an offset from another process are ring memory.
    bool contains(std::uint64_t offset, std::uint64_t bytes) const {
        return offset <= mapping_->length && bytes <= mapping_->length - offset;
    }
    // Offset of `bytes` at `address` when all of it is ring memory; else kNowhere.
    std::uint64_t offset_of(const void* address, std::size_t bytes) const;

    // The object at the offset; the pointer keeps the mapping alive, but not the ring memory.
    template <class T>
    std::shared_ptr<T> hold(std::uint64_t offset) const {
        return {mapping_, at<T>(offset)};
    }

    // Reserves pages now, so that a full machine is an error and not a later crash. Throws OutOfMemory.
    std::uint64_t allocate(std::size_t bytes);
    // Does nothing in a forked process: the memory belongs to its parent.
    void release(std::uint64_t offset) noexcept {
        if (owned()) arena_.release(offset);
    }
    // Does not reuse the block with this offset, if this rank has allocated it, before the condition holds, which each
    // allocation of this rank checks.
    void keep(std::uint64_t offset, const std::shared_ptr<Arena::Condition>& until) noexcept {
        arena_.keep(offset, until);
    }

    // Calls `use` while the owner of the block (any rank) sees that this rank is about to use it. Exceptions of `use`
    // propagate.
    template <class Use>
    void enter(std::uint64_t block, Use&& use) {
        const std::lock_guard<std::mutex> one_at_a_time(entering_);
        struct Entering {
            explicit Entering(RankSlot& own, std::uint64_t block) : own(own) {
                own.entering.store(block, std::memory_order_seq_cst);
            }
            ~Entering() { own.entering.store(kNowhere, std::memory_order_seq_cst); }
            RankSlot& own;
        };
        const Entering entering(slot(local_rank_), block);
        use();
    }
    // Returns the pages of free blocks, which are kept up to kReserve, to the machine.
    void trim() noexcept;
    // Returns all pages of dead ranks to the machine. Those ranks must not be in a group that this rank still uses.
    void drop_dead() noexcept;
    std::size_t allocated() const { return arena_.allocated(); }

    // False in a process that was forked from the one that made this object: there it must not be used.
    bool owned() const { return owner_.is_this_process(); }
    // Whether the process of that rank has ended (also when its parent has not yet reaped it).
    bool dead(int rank) noexcept;
    // Whether a signal or a debugger has stopped it.
    bool stopped(int rank) const;

    // Shows the other ranks which processors this thread may run on now.
    void publish_cores();
    // Number of processors that the ranks of this host may run on together. A launcher may have bound each rank to one.
    int cores() const;

   private:
    struct Mapping {
        Mapping(int fd, std::size_t length);  // takes the descriptor, also when it throws
        ~Mapping();
        int fd;
        std::size_t length;
        std::byte* base = nullptr;
    };

    RingMemory(int local_rank, int local_size, std::shared_ptr<Mapping> mapping, std::size_t arena,
               std::uint64_t token);
    void introduce();

    int local_rank_;
    int local_size_;
    std::shared_ptr<Mapping> mapping_;
    std::int64_t pid_;
    Owner owner_;
    std::uint64_t token_;
    Arena arena_;

    std::mutex entering_;
    std::mutex watching_;  // guards the descriptors on which this process sees other processes end
    std::vector<int> pidfds_;
};

// A block of ring memory that frees itself; Python's view of it.
class Region {
   public:
    Region(std::shared_ptr<RingMemory> ring_memory, std::size_t bytes)
        : ring_memory_(std::move(ring_memory)), bytes_(bytes), offset_(ring_memory_->allocate(bytes)) {}
    ~Region() { ring_memory_->release(offset_); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    void* data() const { return ring_memory_->at(offset_); }
    std::size_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<RingMemory> ring_memory_;
    std::size_t bytes_;
    std::uint64_t offset_;
};

}  // namespace ring
