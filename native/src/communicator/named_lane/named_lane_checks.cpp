// What the named lane looks for while operations wait: ranks that have left or died, deadlines, names that some ranks
// have not posted for long.
#include <algorithm>
#include <utility>

#include "ring/base/text.hpp"
#include "ring/communicator/named_lane.hpp"

namespace ring {
bool NamedLane::in_round() const {
    return !under_way_.empty() && under_way_.front().is_round &&
           !inner_->group_->released(under_way_.front().work->gate_);
}

void NamedLane::check() {
    const std::int64_t now = monotonic_ns();
    if (now < next_check_) return;
    next_check_ = now + kCheckEvery;
    if (owner_.epoch_.fabric) owner_.epoch_.fabric->notices().read(*owner_.epoch_.group);
    if (fabric_) fabric_->notices().read(*owner_.group_);
    if (owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
    if (in_round() || (under_way_.empty() && has_own())) check_members(in_round());
    check_deadlines();
    note_waits(now);
}

// A member that has left, or died, before it took part in the round that this rank waits for. Those that have never
// posted a name are not in the lane's own group.
void NamedLane::check_members(bool in_round) const {
    HostGroup& group = *owner_.group_;
    const auto blame = [&](const std::string& what) {
        group.abort(what);
        throw Aborted(group.abort_reason());
    };
    for (int member = 0; member < group.size(); ++member) {
        if (member == group.index()) continue;
        const int local = group.local_rank(member);
        const bool left = group.has_left(local);
        const bool dead = owner_.domain()->dead(local);
        // After those: it may have come just before.
        if (in_round && inner_->group_->has_arrived(member, under_way_.front().work->gate_)) continue;
        const std::string rank = "rank " + std::to_string(group.ranks()[static_cast<std::size_t>(member)]);
        if (left) blame(rank + " has left (its cell or script ended) while others wait for it");
        if (dead) blame(rank + " has died");
    }
    if (!fabric_) return;
    const std::uint64_t next = inner_ ? inner_->sequence_ + (in_round ? 0 : 1) : 1;
    std::vector<int> gone;
    for (int member : fabric_->notices().departed(next))
        gone.push_back(owner_.ranks()[static_cast<std::size_t>(member)]);
    if (!gone.empty()) blame(rank_list(gone) + " left (cells or scripts ended) while others wait for them");
}

void NamedLane::check_deadlines() {
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> late;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& one : own_)
            if (!one.second->started_ && is_past(one.second->deadline_)) late.push_back(one);
    }
    for (const auto& [key, work] : late) {
        const std::string text =
            owner_.who() + ": " + title(work->header_) + " timed out: " + missing_text(missing(key));
        owner_.group_->abort(text);
        owner_.announce_abort();
        finish(key, work,
               std::make_exception_ptr(Timeout(text + ". Start it on every rank of the group, or raise the timeout.")));
    }
}

// Keeps what this rank has waited for longest, for those who ask what it is doing. When ranks wait too long for a name,
// the first of them reports it, once for each name.
void NamedLane::note_waits(std::int64_t now) {
    std::shared_ptr<Work> oldest;
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> stalled;
    NameKey oldest_key;
    const double limit = owner_.group_->options().stall_warning;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [key, work] : own_) {
            if (work->started_ || work->first_) continue;
            if (!oldest || work->since_ < oldest->since_) {
                oldest = work;
                oldest_key = key;
            }
            if (limit > 0.0 && !work->warned_ && static_cast<double>(now - work->since_) * 1e-9 >= limit) {
                work->warned_ = true;
                stalled.emplace_back(key, work);
            }
        }
    }
    const auto seconds = [&](const Work& work) { return static_cast<double>(now - work.since_) * 1e-9; };
    for (const auto& [key, work] : stalled) {
        const std::vector<int> members = missing(key);
        int first = 0;
        while (std::count(members.begin(), members.end(), first) != 0) ++first;
        if (first != owner_.index() || !reported_.insert(work->request_.name).second) continue;
        warn(owner_.who() + ": " + title(work->header_) + " has waited " + seconds_text(seconds(*work)) + ": " +
             missing_text(members));
    }
    std::optional<NamedWait> wait;
    if (oldest) {
        wait = NamedWait{oldest->header_, seconds(*oldest), {}};
        for (int member : missing(oldest_key))
            wait->missing.push_back(owner_.ranks()[static_cast<std::size_t>(member)]);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    wait_ = std::move(wait);
}

// Members that have not posted it, as far as this rank knows: of the round that it waits in it sees what the ranks of
// its host have brought.
std::vector<int> NamedLane::missing(const NameKey& key) const {
    std::set<int> members;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t member : table_.missing(key)) members.insert(static_cast<int>(member));
    }
    members.erase(owner_.index());
    if (in_round()) {
        const HostGroup& lane = *inner_->group_;
        const Work& round = *under_way_.front().work;
        for (int member = 0; member < lane.size(); ++member) {
            if (!lane.has_arrived(member, round.gate_)) continue;
            const Header header = lane.header(member, round.header_.sequence);
            if (header.is_inline == 0) continue;
            const News news = News::decode(lane.inline_slot(member, round.header_.sequence), header.count);
            const bool posted = std::any_of(news.posts.begin(), news.posts.end(), [&](const Post& post) {
                return !(post.key() < key) && !(key < post.key());
            });
            const int index = owner_.fabric_
                                  ? owner_.fabric_->members(owner_.fabric_->host())[static_cast<std::size_t>(member)]
                                  : member;
            if (posted || news.joins > key.joins) members.erase(index);
        }
    }
    return {members.begin(), members.end()};
}

std::string NamedLane::missing_text(const std::vector<int>& members) const {
    std::vector<int> ranks;
    for (int member : members) ranks.push_back(owner_.ranks()[static_cast<std::size_t>(member)]);
    return rank_list(ranks) + " not started it";
}

}  // namespace ring
