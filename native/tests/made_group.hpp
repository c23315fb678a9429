// A group that all ranks of another one make, as Python's Communicator.group makes it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "ring/communicator/member_group.hpp"

namespace ring::test {

// Null on ranks that are not among `members`.
inline std::shared_ptr<Communicator> make_group(const std::shared_ptr<Communicator>& whole,
                                                const std::vector<int>& members, double timeout) {
    std::optional<MemberGroup> offer;
    if (std::find(members.begin(), members.end(), whole->index()) != members.end()) offer.emplace(whole, members);
    const MemberCard own = offer ? offer->card() : MemberCard{};
    Request gather;
    gather.kind = OpKind::Allgather;
    gather.pieces = {{reinterpret_cast<const std::byte*>(&own), nullptr, sizeof own}};
    gather.shape = {sizeof own};
    const auto work = whole->run(std::move(gather), timeout, nullptr);
    work->get();
    if (!offer) return nullptr;
    std::vector<MemberCard> cards(members.size());
    for (std::size_t i = 0; i < members.size(); ++i)
        std::memcpy(&cards[i], work->result.data.get() + static_cast<std::size_t>(members[i]) * sizeof own, sizeof own);
    auto group = offer->enter(cards);
    group->run({}, timeout, nullptr)->get();  // no member may leave before all have entered
    return group;
}

}  // namespace ring::test
