// What has come to this rank: read from the mailbox and the link, and matched with what it wants to receive.
#include <algorithm>
#include <string>
#include <utility>

#include "messages/letter.hpp"
#include "ring/base/errors.hpp"
#include "ring/group/header_check.hpp"
#include "ring/messages/post_office.hpp"

namespace ring {
namespace {

// More than a rank takes from its mailbox at once: each takes memory of its sender.
constexpr std::size_t kMostLetters = std::size_t{1} << 20;

Error damaged(const std::string& what) {
    return Error("another rank of this host wrote what no rank writes (" + what +
                 "): its memory is damaged; restart all ranks");
}

}  // namespace

// Another process has written both the offset and the letter.
Letter* PostOffice::letter_at(std::uint64_t offset) const {
    const Domain& domain = group_->domain();
    if (offset % alignof(Letter) != 0 || !domain.contains(offset, sizeof(Letter)))
        throw damaged("a message beyond ring memory");
    auto* const letter = domain.at<Letter>(offset);
    if (letter->from < 0 || letter->from >= static_cast<int>(place_.ranks.size()) || local(letter->from) < 0)
        throw damaged("a message of member " + std::to_string(letter->from));
    if (static_cast<int>(letter->dtype) >= kDTypes || letter->count >= kNoTensor / sizeof(double))
        throw damaged("a message of " + std::to_string(letter->count) + " elements of " + to_string(letter->dtype));
    return letter;
}

// What has come since, oldest first.
void PostOffice::take_arrivals() {
    if (link_)
        for (RemoteMessage remote; link_->take(remote);) {
            const MessageHead& head = remote.head;
            arrived_.push_back({head.from, head.tag, head.dtype, head.count, nullptr, std::move(remote)});
        }
    SharedAtomic<std::uint64_t>& letters = group_->letters(group_->index());
    if (letters.load(std::memory_order_seq_cst) == kNowhere) return;
    std::uint64_t newest = letters.exchange(kNowhere, std::memory_order_seq_cst);
    const auto before = static_cast<std::ptrdiff_t>(arrived_.size());
    while (newest != kNowhere) {
        Letter* const letter = letter_at(newest);
        if (arrived_.size() - static_cast<std::size_t>(before) > kMostLetters)
            throw damaged("there is no end of its messages");
        arrived_.push_back({letter->from, letter->tag, letter->dtype, letter->count, letter, {}});
        newest = letter->next;
    }
    std::reverse(arrived_.begin() + before, arrived_.end());
}

bool PostOffice::match() {
    bool moved = false;
    for (std::size_t i = 0; i < wanted_.size();) {
        const auto message = wanted_[i];
        const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrival& arrival) {
            return arrival.tag == message->tag_ && (message->peer_ == kAny || message->peer_ == arrival.from);
        });
        if (found == arrived_.end()) {
            ++i;
            continue;
        }
        Arrival arrival = std::move(*found);
        arrived_.erase(found);
        wanted_.erase(wanted_.begin() + static_cast<std::ptrdiff_t>(i));
        receiving_.push_back(message);  // so that an abort finds it
        accept(*message, arrival);
        if (message->done()) receiving_.pop_back();
        moved = true;
    }
    return moved;
}

}  // namespace ring
