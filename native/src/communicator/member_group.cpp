#include "ring/communicator/member_group.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

namespace ring {
namespace {

// Tells the ids of these groups from those of groups that all ranks make, which are made from a count of operations.
constexpr std::uint64_t kByMembers = std::uint64_t{1} << 63;

std::uint64_t next_of_this_process() {
    static std::atomic<std::uint64_t> made{0};
    return made.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

MemberGroup::MemberGroup(std::shared_ptr<Communicator> parent, std::vector<int> members)
    : parent_(std::move(parent)), members_(std::move(members)) {
    Request request;
    request.kind = OpKind::Group;
    if (std::find(members_.begin(), members_.end(), parent_->index()) == members_.end())
        throw parent_->invalid(request, "only its members make it, and this rank is not one");
    parent_->validate(request);
    if (parent_->fabric_ && parent_->fabric_->spans(members_)) {
        number_ = std::make_shared<TagNumber>(parent_->fabric_->shared_link());
        const auto first = static_cast<std::uint64_t>(members_.front());
        id_ = parent_->fabric_->part_id(kByMembers | first << 40 | next_of_this_process());
    }
    reservation_ = parent_->reserve_part(members_);
}

MemberCard MemberGroup::card() const {
    return {reservation_ ? reservation_->offset() : kNowhere, id_, number_ ? number_->value() : -1};
}

std::shared_ptr<Communicator> MemberGroup::enter(const std::vector<MemberCard>& cards) {
    Request request;
    request.kind = OpKind::Group;
    if (cards.size() != members_.size())
        throw parent_->invalid(request, "it has " + std::to_string(members_.size()) + " members, and " +
                                            std::to_string(cards.size()) + " cards were given");
    const auto first = std::find_if(members_.begin(), members_.end(), [&](int member) {
        return !parent_->fabric_ || parent_->fabric_->host_of(member) == parent_->fabric_->host();
    });
    const std::uint64_t block = cards[static_cast<std::size_t>(first - members_.begin())].block;
    if (block == kNowhere) throw Aborted("the first member of the group on this host has no memory for it");
    auto group = std::make_shared<HostGroup>(parent_->domain(), block, parent_->members_here(members_),
                                             std::move(reservation_), parent_->epoch_.group);
    std::shared_ptr<Fabric> fabric;
    if (number_) {
        std::vector<int> numbers;
        for (const MemberCard& card : cards) numbers.push_back(card.number);
        fabric = parent_->fabric_->part(members_, {cards.front().id, std::move(numbers), std::move(number_)});
    }
    std::vector<int> ranks;
    for (int member : members_) ranks.push_back(parent_->ranks()[static_cast<std::size_t>(member)]);
    const auto own = std::find(members_.begin(), members_.end(), parent_->index()) - members_.begin();
    return std::shared_ptr<Communicator>(new Communicator(std::move(ranks), static_cast<int>(own), std::move(group),
                                                          std::move(fabric), parent_->epoch_));
}

}  // namespace ring
