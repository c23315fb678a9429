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

Mailbox* mailboxes_of(const Domain& domain, std::uint64_t block) {
    return domain.at<Mailbox>(block + BlockLayout(0, {}).mailboxes);
}

std::uint64_t checked_block(const Domain& domain, std::uint64_t offset) {
    if (offset % alignof(GroupBlock) != 0 || !domain.contains(offset, BlockLayout(domain.local_size(), {}).bytes))
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

    bool holds(Domain& domain) noexcept override {
        if (!closed_.load(std::memory_order_seq_cst)) return false;
        for (std::size_t i = 0; i < local_.size(); ++i) {
            // In this order: who takes a reference stops entering only when it has it.
            const bool enters = domain.slot(local_[i]).entering.load(std::memory_order_seq_cst) == offset_;
            const Reference reference = mailboxes_of(domain, offset_)[i].reference.load(std::memory_order_seq_cst);
            const bool uses = reference == Reference::Held || (reference == Reference::NotTaken && enters);
            if (uses && !domain.dead(local_[i])) return false;
        }
        return true;
    }

   private:
    std::vector<int> local_;
    std::uint64_t offset_ = kNowhere;
    std::atomic<bool> closed_{false};
};

BlockReservation::BlockReservation(std::shared_ptr<Domain> domain, const std::vector<int>& local, const Room& room)
    : domain_(std::move(domain)), unused_(std::make_shared<Unused>(local)) {
    const int size = static_cast<int>(local.size());
    const BlockLayout layout(size, room);
    offset_ = domain_->allocate(layout.bytes);
    unused_->reserved(offset_);
    auto* block = new (domain_->at(offset_)) GroupBlock();
    block->size = size;
    block->room = room;
    Mailbox* mailboxes = mailboxes_of(*domain_, offset_);
    for (int i = 0; i < size; ++i) new (mailboxes + i) Mailbox();
}

BlockReservation::~BlockReservation() {
    if (!domain_->owned()) return;
    // Where a generation has been published with this block, those that are late find that it is closed.
    std::uint64_t published = offset_;
    domain_->slot(domain_->local_rank())
        .generation_block.compare_exchange_strong(published, kClosed, std::memory_order_seq_cst);
    unused_->close();
    domain_->keep(offset_, unused_);
    domain_->release(offset_);
}

BlockReference::BlockReference(Domain& domain, std::uint64_t offset, std::vector<int> local, int index,
                               const std::function<bool()>& is_valid)
    : block_(domain.hold<GroupBlock>(checked_block(domain, offset))),
      mailboxes_(mailboxes_of(domain, offset)),
      local_(std::move(local)),
      index_(index) {
    domain.enter(offset, [&] {
        // A rank that has heard half of what was agreed, because another one died over it, has too short a list.
        if (!is_valid() || block_->size != static_cast<int>(local_.size()))
            throw Aborted("local rank " + std::to_string(domain.local_rank()) +
                          " is too late for this group: the other ranks have already left it");
        mailbox(index_).reference.store(Reference::Held, std::memory_order_seq_cst);
    });
}

BlockReference::~BlockReference() {
    if (owner_.is_this_process()) mailbox(index_).reference.store(Reference::Dropped, std::memory_order_seq_cst);
}

bool BlockReference::holds(Domain& domain) noexcept {
    for (int i = 0; i < static_cast<int>(local_.size()); ++i)
        if (i != index_ &&
            (mailbox(i).busy.load(std::memory_order_seq_cst) != 0 ||
             mailbox(i).reading.load(std::memory_order_seq_cst) != 0) &&
            !domain.dead(local_[static_cast<std::size_t>(i)]))
            return false;
    return true;
}

}  // namespace ring
