#include "ring/collectives/device/device_card.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace ring {
namespace {

// Compares UUIDs, which are unique, and not host names, because containers of one machine have different host names.
bool same_device(const DeviceCard& a, const DeviceCard& b) {
    return std::memcmp(a.device.bytes, b.device.bytes, sizeof a.device.bytes) == 0;
}

}  // namespace

void DeviceCard::refuse(const std::string& why) {
    refuses = 1;
    why.copy(reason, std::min(why.size(), sizeof reason - 1));
}

bool is_zero(const NcclId& id) {
    return std::all_of(std::begin(id.bytes), std::end(id.bytes), [](char byte) { return byte == 0; });
}

bool have_kept_one(const std::vector<DeviceCard>& cards) {
    const NcclId& first = cards.front().kept;
    return !is_zero(first) && std::all_of(cards.begin(), cards.end(), [&](const DeviceCard& card) {
        return std::memcmp(&card.kept, &first, sizeof first) == 0;
    });
}

std::string why_not_nccl(const std::vector<DeviceCard>& cards, const std::vector<int>& ranks) {
    const auto rank = [&](std::size_t i) { return "rank " + std::to_string(ranks[i]); };
    for (std::size_t i = 0; i < cards.size(); ++i)
        if (cards[i].refuses != 0) return rank(i) + ": " + cards[i].reason;
    for (std::size_t i = 0; i < cards.size(); ++i)
        for (std::size_t j = i + 1; j < cards.size(); ++j)
            if (same_device(cards[i], cards[j]) && (cards[i].shares == 0 || cards[j].shares == 0))
                return "ranks " + std::to_string(ranks[i]) + " and " + std::to_string(ranks[j]) + " share device " +
                       std::to_string(cards[i].index) + " of host " + cards[i].host;
    for (std::size_t i = 1; i < cards.size(); ++i)
        if (cards[i].nccl != cards[0].nccl)
            return rank(0) + " has NCCL " + nccl_version_text(cards[0].nccl) + " and " + rank(i) + " has " +
                   nccl_version_text(cards[i].nccl);
    return "";
}

}  // namespace ring
