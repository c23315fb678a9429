// The block of ring memory in which the ranks of one host meet: what lies in it, and who holds it.
//
// The first member reserves the block in its arena and tells the others its offset. Each member takes a reference for
// as long as it uses the block; the owner frees it when all references are dropped and nobody can take one any more.
// A member that is late reads an offset whose block may be gone, so it first publishes that offset in its own slot,
// which is never freed, and then looks whether the offset still counts (a hazard pointer; Michael 2004).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/base/shared_atomic.hpp"
#include "ring/group/header.hpp"
#include "ring/group/standstill.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

#define RING_RANK_STATES(X) X(Idle, "idle") X(Waiting, "waiting") X(Moving, "moving") X(Left, "left")
RING_ENUM(RankState, std::uint32_t, RING_RANK_STATES);

constexpr std::size_t kReasonBytes = 4096;
constexpr std::uint64_t kRuledOut = std::uint64_t{1} << 63;
// A staged operation fills one segment while the one before is reduced and the one before that is copied out.
constexpr std::size_t kSegmentSlots = 3;

// What the block of a group has room for. The member that reserves it decides for all.
struct Room {
    std::size_t ranks = 0;          // members on all hosts
    std::size_t inline_bytes = 0;   // of a payload that travels in the mailbox
    std::size_t segment_bytes = 0;  // of a segment
    std::size_t extra = 0;          // bytes that the group's hosts share
};

// Of one member; only that member writes it.
enum class Reference : std::uint32_t { NotTaken = 0, Held = 1, Dropped = 2 };

struct alignas(128) Mailbox {
    SharedAtomic<std::uint64_t> arrivals{0};
    SharedAtomic<std::uint32_t> busy{0};              // is touching other ranks' memory, in an operation
    SharedAtomic<std::uint32_t> reading{0};           // the same, for a message
    SharedAtomic<std::uint64_t> envelopes{kNowhere};  // the newest message to this member that it has not taken
    SharedAtomic<RankState> state{RankState::Idle};
    SharedAtomic<std::int64_t> since{0};
    SharedAtomic<std::uint32_t> left{0};
    SharedAtomic<Reference> reference{Reference::NotTaken};
    SharedCopy<Standstill> standstill;  // in the block of a generation
    // Of operations of even and odd sequence.
    struct alignas(64) Posted : SharedCopy<Header> {};
    Posted headers[2];
};

struct GroupBlock {
    std::int32_t size = 0;
    Room room;
    SharedAtomic<std::int32_t> left{0};
    alignas(64) SharedAtomic<std::uint64_t> arrived{0};
    SharedAtomic<std::int32_t> last{-1};  // index of the member that released the gate
    alignas(64) SharedAtomic<std::uint64_t> released{0};
    // Offset of the named lane's block, which the first member that needs it reserves.
    SharedAtomic<std::uint64_t> lane{kNowhere};
    // Sequence of the last operation known to complete on all members in spite of an abort, and kRuledOut once a member
    // has given up the next one.
    SharedAtomic<std::uint64_t> decided{0};
    SharedAtomic<std::uint64_t> ticket{0};  // of the operation on devices whose gate was released last; see Tickets
    // Only the block of a generation uses these; its groups share them.
    alignas(64) SharedAtomic<std::uint32_t> aborted{0};  // 1: the reason is being written, 2: it can be read
    SharedAtomic<std::uint32_t> by_mismatch{0};          // the ranks have called different things
    SharedAtomic<std::uint32_t> announced{0};            // whether a rank of this host tells the other hosts
    SharedAtomic<std::uint32_t> departures{0};
    SharedAtomic<std::uint64_t> tickets{0};  // the greatest that a rank of this host has seen
    char reason[kReasonBytes] = {};
};

// Where the parts of a block of n members begin:
//   | GroupBlock | Mailbox x n | inline slots 2 x n | splits 2 x n x all ranks | segments 3 x n | extra |
struct BlockLayout {
    BlockLayout(int size, const Room& room);
    std::size_t mailboxes, slots, splits, segments, extra, bytes;
};

// The owner's right to let members into a block: while it lives they may take references. It never waits.
class BlockReservation {
   public:
    // A block for a group of these local ranks, in this rank's arena. Throws OutOfMemory.
    BlockReservation(std::shared_ptr<RingMemory> ring_memory, const std::vector<int>& local, const Room& room);
    // Closes the block; it is freed when the last member has dropped its reference or died.
    ~BlockReservation();
    BlockReservation(const BlockReservation&) = delete;
    BlockReservation& operator=(const BlockReservation&) = delete;

    std::uint64_t offset() const { return offset_; }

   private:
    class Unused;

    std::shared_ptr<RingMemory> ring_memory_;
    std::uint64_t offset_ = kNowhere;
    std::shared_ptr<Unused> unused_;
};

// A member's reference to the block. As a condition it holds when no other member touches this rank's memory. It owns
// the mapping but not the ring memory, which may own this object.
class BlockReference : public Arena::Condition {
   public:
    // `is_valid`, called when the owner can see that this rank takes a reference, says whether the offset still counts.
    // Throws Aborted if not, or if the block has another number of members.
    BlockReference(RingMemory& ring_memory, std::uint64_t offset, std::vector<int> local, int index,
                   const std::function<bool()>& is_valid);
    ~BlockReference() override;
    BlockReference(const BlockReference&) = delete;
    BlockReference& operator=(const BlockReference&) = delete;

    GroupBlock& block() const { return *block_; }
    Mailbox& mailbox(int member) const { return mailboxes_[member]; }
    // The byte at that distance from the block's beginning.
    std::byte* at(std::size_t distance) const { return reinterpret_cast<std::byte*>(block_.get()) + distance; }
    bool holds(RingMemory& ring_memory) noexcept override;

   private:
    Owner owner_;
    std::shared_ptr<GroupBlock> block_;
    Mailbox* mailboxes_;
    std::vector<int> local_;
    int index_;
};

}  // namespace ring
