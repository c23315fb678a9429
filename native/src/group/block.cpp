#include "ring/group/block.hpp"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "ring/base/errors.hpp"

namespace ring {
namespace {

Mailbox* mailboxes_of(const RingMemory& ring_memory, std::uint64_t block) {
    return ring_memory.at<Mailbox>(block + BlockLayout(0, {}).mailboxes);
}

std::uint64_t checked_block(const RingMemory& ring_memory, std::uint64_t offset) {
    if (offset % alignof(GroupBlock) != 0 ||
        !ring_memory.contains(offset, BlockLayout(ring_memory.local_size(), {}).bytes))
        throw Error("the block of a group lies beyond ring memory: the memory of the rank that reserved it is damaged");
    return offset;
}

}  // namespace

BlockLayout::BlockLayout(int size, const Room& room) {
    const auto n = static_cast<std::size_t>(size);
    mailboxes = round_up(sizeof(GroupBlock), kPage);
    slots = round_up(mailboxes + n * sizeof(Mailbox), kPage);
    splits = round_up(slots + 2 * n * room.inline_bytes, kPage);
    segments = round_up(splits + 2 * n * room.ranks * sizeof(std::int64_t), kPage);
    extra = segments + kSegmentSlots * n * room.segment_bytes;
    bytes = extra + room.extra;
}

// Whether no member uses the block, nor will.
class BlockReservation::Unused : public Arena::Condition {
   public:
    explicit Unused(std::vector<int> local) : local_(std::move(local)) {}

    void reserved(std::uint64_t offset) { offset_ = offset; }
    void close() { closed_.store(true, std::memory_order_seq_cst); }

    bool holds(RingMemory& ring_memory) noexcept override {
        if (!closed_.load(std::memory_order_seq_cst)) return false;
        for (std::size_t i = 0; i < local_.size(); ++i) {
            // In this order: a member takes its reference before it stops entering.
            const bool enters = ring_memory.slot(local_[i]).entering.load(std::memory_order_seq_cst) == offset_;
            const Reference reference = mailboxes_of(ring_memory, offset_)[i].reference.load(std::memory_order_seq_cst);
            const bool uses = reference == Reference::Held || (reference == Reference::NotTaken && enters);
            if (uses && !ring_memory.dead(local_[i])) return false;
        }
        return true;
    }

   private:
    std::vector<int> local_;
    std::uint64_t offset_ = kNowhere;
    std::atomic<bool> closed_{false};
};

BlockReservation::BlockReservation(std::shared_ptr<RingMemory> ring_memory, const std::vector<int>& local,
                                   const Room& room)
    : ring_memory_(std::move(ring_memory)), unused_(std::make_shared<Unused>(local)) {
    const int size = static_cast<int>(local.size());
    const BlockLayout layout(size, room);
    offset_ = ring_memory_->allocate(layout.bytes);
    unused_->reserved(offset_);
    auto* block = new (ring_memory_->at(offset_)) GroupBlock();
    block->size = size;
    block->room = room;
    Mailbox* mailboxes = mailboxes_of(*ring_memory_, offset_);
    for (int i = 0; i < size; ++i) new (mailboxes + i) Mailbox();
}

BlockReservation::~BlockReservation() {
    if (!ring_memory_->owned()) return;
    // If a generation was published with this block, late members find it closed.
    std::uint64_t published = offset_;
    ring_memory_->slot(ring_memory_->local_rank())
        .generation_block.compare_exchange_strong(published, kClosed, std::memory_order_seq_cst);
    unused_->close();
    ring_memory_->keep(offset_, unused_);
    ring_memory_->release(offset_);
}

BlockReference::BlockReference(RingMemory& ring_memory, std::uint64_t offset, std::vector<int> local, int index,
                               const std::function<bool()>& is_valid)
    : block_(ring_memory.hold<GroupBlock>(checked_block(ring_memory, offset))),
      mailboxes_(mailboxes_of(ring_memory, offset)),
      local_(std::move(local)),
      index_(index) {
    ring_memory.enter(offset, [&] {
        // If another rank died during the agreement, this one may have too short a list.
        if (!is_valid() || block_->size != static_cast<int>(local_.size()))
            throw Aborted("local rank " + std::to_string(ring_memory.local_rank()) +
                          " is too late for this group: the other ranks have already left it");
        mailbox(index_).reference.store(Reference::Held, std::memory_order_seq_cst);
    });
}

BlockReference::~BlockReference() {
    if (owner_.is_this_process()) mailbox(index_).reference.store(Reference::Dropped, std::memory_order_seq_cst);
}

bool BlockReference::holds(RingMemory& ring_memory) noexcept {
    for (int i = 0; i < static_cast<int>(local_.size()); ++i)
        if (i != index_ &&
            (mailbox(i).busy.load(std::memory_order_seq_cst) != 0 ||
             mailbox(i).reading.load(std::memory_order_seq_cst) != 0) &&
            !ring_memory.dead(local_[static_cast<std::size_t>(i)]))
            return false;
    return true;
}

}  // namespace ring
