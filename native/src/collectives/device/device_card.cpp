#include "ring/collectives/device/device_card.hpp"

#include <algorithm>
#include <cstring>

namespace ring {
namespace {

bool same_device(const DeviceCard& a, const DeviceCard& b) {
    return std::strncmp(a.host, b.host, sizeof a.host) == 0 &&
           std::memcmp(a.device.bytes, b.device.bytes, sizeof a.device.bytes) == 0;
}

}  // namespace

void DeviceCard::refuse(const std::string& why) {
    refuses = 1;
    why.copy(reason, std::min(why.size(), sizeof reason - 1));
}

bool have_kept_one(const std::vector<DeviceCard>& cards) {
    const auto same = [](const NcclId& a, const NcclId& b) { return std::memcmp(&a, &b, sizeof a) == 0; };
    return !same(cards.front().kept, NcclId{}) && std::all_of(cards.begin(), cards.end(), [&](const DeviceCard& card) {
        return same(card.kept, cards.front().kept);
    });
}

std::string why_not_nccl(const std::vector<DeviceCard>& cards, const std::vector<int>& ranks) {
    const auto rank = [&](std::size_t i) { return "rank " + std::to_string(ranks[i]); };
    for (std::size_t i = 0; i < cards.size(); ++i)
        if (cards[i].refuses != 0) return rank(i) + ": " + cards[i].reason;
    for (std::size_t i = 0; i < cards.size(); ++i)
        for (std::size_t j = i + 1; j < cards.size(); ++j)
            if (same_device(cards[i], cards[j]))
                return "ranks " + std::to_string(ranks[i]) + " and " + std::to_string(ranks[j]) + " share device " +
                       std::to_string(cards[i].index) + " of host " + cards[i].host;
    for (std::size_t i = 1; i < cards.size(); ++i)
        if (cards[i].nccl != cards[0].nccl)
            return rank(0) + " has NCCL " + nccl_version_text(cards[0].nccl) + " and " + rank(i) + " has " +
                   nccl_version_text(cards[i].nccl);
    return "";
}

}  // namespace ring
