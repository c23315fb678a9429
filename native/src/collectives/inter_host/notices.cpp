#include "ring/collectives/inter_host/notices.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "ring/base/errors.hpp"
#include "ring/collectives/inter_host/fabric.hpp"

namespace ring {
namespace {

constexpr std::int64_t kLinger = 100'000'000;  // ns

}  // namespace

struct Notices::Notice {
    std::uint64_t id = 0;            // of the group
    std::int64_t last_sequence = 0;  // of the sender's host, which departs; or one of the kinds below 0
    char reason[kReasonBytes] = {};
};

struct Notices::Outgoing {
    Notice notice;
    std::size_t bytes = 0;  // 0 before an announcement
    int next = 0;           // the member that it is sent to next
    int end = 0;            // behind the last one
    Outgoing* kept = nullptr;
};

Notices::Notices(const Fabric& fabric) : fabric_(fabric) {
    for (auto& one : outgoing_) one = std::make_unique<Outgoing>();
    sending_.reserve(outgoing_.size() * static_cast<std::size_t>(fabric.size()));
    left_.reserve(static_cast<std::size_t>(fabric.size()));
    left_at_.assign(static_cast<std::size_t>(fabric.hosts()), kAbort);
    standing_.resize(static_cast<std::size_t>(fabric.hosts()));
}

Notices::~Notices() {
    if (fabric_.is_forked()) {
        // Another thread of the parent may have held the mutex, or that of the link, when this process was forked.
        for (auto& one : outgoing_) keep(std::move(one));
        return;
    }
    const auto is_due = [&](const auto& one) { return one->bytes != 0 && one->next < one->end; };
    const std::int64_t deadline = monotonic_ns() + kLinger;
    bool all_sent = false;
    do {
        send_due();
        all_sent = sending_.empty() && std::none_of(outgoing_.begin(), outgoing_.end(), is_due);
        if (!all_sent) cpu_yield();
    } while (!all_sent && monotonic_ns() < deadline);
    if (!all_sent)
        for (auto& one : outgoing_) keep(std::move(one));
    for (Incoming& one : arriving_) fabric_.link().cancel(one.transfer, std::move(one.notice));
}

// In a list that is never read: a leak checker ignores memory that is reachable.
void Notices::keep(std::unique_ptr<Outgoing> outgoing) noexcept {
    static std::atomic<Outgoing*> newest{nullptr};
    Outgoing* one = outgoing.release();
    one->kept = newest.load();
    while (!newest.compare_exchange_weak(one->kept, one)) {
    }
}

void Notices::announce_abort(std::string_view reason, bool is_mismatch) noexcept {
    announce(kAbortion, is_mismatch ? kMismatch : kAbort, reason);
}

void Notices::announce_departure(std::uint64_t last_sequence) noexcept {
    announce(kDeparture, static_cast<std::int64_t>(last_sequence), {});
}

void Notices::announce_leaving() noexcept { announce(kLeave, kLeaving, {}); }

void Notices::announce(Kind kind, std::int64_t last_sequence, std::string_view reason) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (outgoing_[kind]->bytes != 0) return;
    write(*outgoing_[kind], last_sequence, reason);
    send(*outgoing_[kind]);
}

void Notices::write(Outgoing& outgoing, std::int64_t last_sequence, std::string_view text) noexcept {
    outgoing.notice.id = fabric_.id();
    outgoing.notice.last_sequence = last_sequence;
    const std::size_t length = text.copy(outgoing.notice.reason, kReasonBytes - 1);
    outgoing.notice.reason[length] = '\0';
    // As short as possible: an MPI sends short messages without the receiver's help.
    outgoing.bytes = offsetof(Notice, reason) + length + 1;
    outgoing.end = fabric_.size();
}

void Notices::tell_standstill(std::string_view encoded) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget_sent();
    Outgoing& outgoing = *outgoing_[kStandstill];
    if (!sending_.empty() || outgoing.next < outgoing.end) return;
    write(outgoing, kStanding, encoded);
    outgoing.next = fabric_.members(0).front();
    outgoing.end = outgoing.next + 1;
    send(outgoing);
}

bool Notices::all_stand_still(StandingRanks& ranks, std::int64_t since) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int host = 0; host < fabric_.hosts(); ++host) {
        const Standing& one = standing_[static_cast<std::size_t>(host)];
        if (host == fabric_.host() || left_at_[static_cast<std::size_t>(host)] != kAbort) continue;
        if (one.told < since) return false;
        ranks.add_encoded(one.encoded);
    }
    return true;
}

void Notices::send_due() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget_sent();
    for (auto& one : outgoing_) send(*one);
}

void Notices::send(Outgoing& outgoing) noexcept {
    if (outgoing.bytes == 0) return;
    for (; outgoing.next < outgoing.end; ++outgoing.next) {
        if (fabric_.host_of(outgoing.next) == fabric_.host()) continue;
        try {
            sending_.push_back(fabric_.send(Fabric::kNotice, outgoing.next, &outgoing.notice, outgoing.bytes));
        } catch (const std::bad_alloc&) {
            return;                        // it stays due
        } catch (const std::exception&) {  // the other members may still get it
        }
    }
}

// A failed link has already failed the operations that wait for it; their notices cannot be sent.
void Notices::forget_sent() noexcept {
    const auto is_over = [&](Link::Transfer& one) {
        try {
            return fabric_.link().done(one);
        } catch (const std::bad_alloc&) {
            return false;
        } catch (const std::exception&) {
            return true;
        }
    };
    sending_.erase(std::remove_if(sending_.begin(), sending_.end(), is_over), sending_.end());
}

bool Notices::read(HostGroup& group) {
    send_due();
    // One thread at a time: otherwise two would see the same message, and the second would receive one that is not
    // there.
    const std::lock_guard<std::mutex> lock(mutex_);
    int source = 0;
    std::size_t bytes = 0;
    while (fabric_.has_come(Fabric::kNotice, source, bytes)) {
        auto notice = std::make_shared<Notice>();
        arriving_.reserve(arriving_.size() + 1);
        const Link::Transfer transfer = fabric_.receive_come(Fabric::kNotice, source, notice.get(), sizeof(Notice));
        arriving_.push_back({std::move(notice), source, bytes, transfer});
    }
    // The rest of a message may never come: its sender may have died after it had announced it.
    for (auto one = arriving_.begin(); one != arriving_.end();) {
        if (fabric_.link().done(one->transfer)) {
            const Incoming come = std::move(*one);
            one = arriving_.erase(one);
            apply(come, group);
        } else {
            ++one;
        }
    }
    return arriving_.empty();
}

void Notices::apply(const Incoming& come, HostGroup& group) {
    const Notice& notice = *come.notice;
    if (notice.id != fabric_.id()) return;  // of a generation that ended long ago
    const int member = fabric_.member_at(come.source);
    const auto host = static_cast<std::size_t>(member < 0 ? 0 : fabric_.host_of(member));
    if (notice.last_sequence == kAbort || notice.last_sequence == kMismatch) {
        group.abort_by_other_host({notice.reason, strnlen(notice.reason, kReasonBytes)},
                                  notice.last_sequence == kMismatch);
    } else if (notice.last_sequence == kLeaving) {
        left_.push_back(come.source);
    } else if (notice.last_sequence == kStanding && member >= 0) {
        const std::size_t front = offsetof(Notice, reason) + 1;  // with the zero behind the text
        standing_[host].told = monotonic_ns();
        standing_[host].encoded.assign(notice.reason, std::clamp(come.bytes, front, sizeof notice) - front);
    } else if (notice.last_sequence >= 0 && member >= 0) {
        left_at_[host] = notice.last_sequence;
    }
}

bool Notices::has_left(int address) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::find(left_.begin(), left_.end(), address) != left_.end();
}

std::vector<int> Notices::departed(std::uint64_t sequence) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> gone;
    for (int host = 0; host < fabric_.hosts(); ++host) {
        const std::int64_t last = left_at_[static_cast<std::size_t>(host)];
        if (last == kAbort || static_cast<std::int64_t>(sequence) <= last) continue;
        gone.insert(gone.end(), fabric_.members(host).begin(), fabric_.members(host).end());
    }
    return gone;
}

}  // namespace ring
