#include "ring/communicator/named_lane.hpp"

#include <algorithm>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/hash.hpp"
#include "ring/base/text.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/communicator/fusion.hpp"

namespace ring {

NamedLane::NamedLane(Communicator& owner)
    : owner_(owner),
      fabric_(owner.fabric_ ? owner.fabric_->lane() : nullptr),
      table_(static_cast<std::size_t>(owner.size())) {}

NamedLane::~NamedLane() {
    if (!owner_.ring_memory()->owned()) return;
    if (reserved_) owner_.group_->publish_lane(kClosed);  // before its block is freed, so that no rank enters it
    inner_.reset();                                       // ends operations under way
    under_way_.clear();
    fail_waiting();
}

void NamedLane::post(const std::shared_ptr<Work>& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const NameKey key{work->header.name, hash_of(work->request.name), joins_ended_};
    if (own_.count(key) != 0)
        throw owner_.invalid(work->request,
                             "an operation of that name is under way; wait for it first, or choose another name");
    work->machine.since = monotonic_ns();
    own_.emplace(key, work);
    (work->first ? following_ : fresh_).push_back(key);
    busy_.store(true, std::memory_order_release);
}

NamedLane::Joining::Joining(NamedLane& lane) : lane_(lane) {
    const std::lock_guard<std::mutex> lock(lane_.mutex_);
    ++lane_.joins_called_;
    lane_.busy_.store(true, std::memory_order_release);
}

NamedLane::Joining::~Joining() {
    const std::lock_guard<std::mutex> lock(lane_.mutex_);
    lane_.joins_called_ = lane_.joins_ended_;
}

void NamedLane::Joining::end(const Work& join) {
    if (join.error) return;
    const std::lock_guard<std::mutex> lock(lane_.mutex_);
    lane_.joins_ended_ = lane_.joins_called_;
}

bool NamedLane::has_own() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !own_.empty();
}

void NamedLane::begin_close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
}

bool NamedLane::is_quiet() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return own_.empty() && under_way_.empty() && (!inner_ || !inner_->device_ || inner_->device_->is_quiet());
}

void NamedLane::leave() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (inner_) inner_->group_->leave();
}

void NamedLane::announce_departure() const noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    fabric_->notices().announce_departure(begun_);
}

NamedLane::Counts NamedLane::counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counts counts = counts_;
    if (inner_) counts.gates = inner_->group_->gates();
    for (int host = 0; fabric_ && host < fabric_->hosts(); ++host) {
        counts.messages += fabric_->sent(host).messages;
        counts.bytes += fabric_->sent(host).bytes;
    }
    return counts;
}

std::optional<NamedWait> NamedLane::wait() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return wait_;
}

NamedLane::Served NamedLane::serve() {
    const Served launched = inner_ && inner_->device_ ? inner_->device_->serve() : Served::Idle;
    if (launched == Served::Done) owner_.idle_.ring();
    return busy_.load(std::memory_order_acquire) ? std::max(launched, serve_lane()) : launched;
}

NamedLane::Served NamedLane::serve_lane() {
    Served served = Served::Done;
    try {
        if (!under_way_.empty()) {
            served = inner_->serve_queue();
            // An operation that failed during its launch leaves the queue now, and ends when its kernel does.
            if (under_way_.front().work->launched()) {
                served = settle();
            } else {
                check();
            }
        } else {
            if (owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
            served = listen();
        }
    } catch (...) {
        fail(std::current_exception());
    }
    update_busy();
    return served;
}

void NamedLane::update_busy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool joins = joins_called_ != joins_ended_ && !owner_.group_->aborted();
    busy_.store(!own_.empty() || !under_way_.empty() || joins, std::memory_order_release);
    if (own_.empty()) wait_.reset();
}

NamedLane::Served NamedLane::listen() {
    tell_what_follows();
    // Only a leader polls the link: the other ranks of its host see it wait at the gate.
    const bool leads = fabric_ && owner_.group_->index() == 0;
    const bool called = leads && fabric_->is_called();
    if ((inner_ || open(called)) && (called || inner_->group_->is_called() || has_news())) return begin_round();
    check();
    return leads ? Served::Polling : Served::Blocked;
}

// The rank that first needs the lane reserves its block; the others enter the block later.
bool NamedLane::open(bool called) {
    HostGroup& group = *owner_.group_;
    std::unique_ptr<BlockReservation> reservation;
    HostGroup::Members members{{}, group.ranks(), group.index(), 0, 0, group.options()};
    for (int member = 0; member < group.size(); ++member) members.local.push_back(group.local_rank(member));
    if ((called || has_own()) && group.claim_lane()) {
        const Room room{owner_.ranks().size(), group.inline_bytes(), group.segment_bytes(),
                        fabric_ ? extra_bytes(*fabric_) : 0};
        reservation = std::make_unique<BlockReservation>(owner_.ring_memory(), members.local, room);
        reserved_ = true;
        group.publish_lane(reservation->offset());
    }
    const std::uint64_t block = group.lane();
    if (block == kNowhere || block == kClaimed) return false;
    auto lane = std::make_shared<HostGroup>(owner_.ring_memory(), block, std::move(members), std::move(reservation),
                                            owner_.generation_.group, &group);
    const std::lock_guard<std::mutex> lock(mutex_);
    inner_.reset(new Communicator(owner_, std::move(lane), fabric_));
    return true;
}

void NamedLane::push(UnderWay next) {
    inner_->queue_.push_back(next.work);
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.push_back(std::move(next));
    ++begun_;
}

// Completes the operations that have ended.
NamedLane::Served NamedLane::settle() {
    while (!under_way_.empty() && under_way_.front().work->launched()) {
        const UnderWay ended = under_way_.front();
        for (const NameKey& key : ended.names) {
            const std::shared_ptr<Work> work = own(key);
            if (!ended.work->done()) {
                forget(key);
                inner_->device_->follow(*ended.work, work);
                continue;
            }
            if (ended.names.size() == 1) work->result = std::move(ended.work->result);
            finish(key, work, ended.work->error);
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            under_way_.pop_front();
        }
        if (ended.is_round && owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
        if (ended.is_round && ended.work->error) std::rethrow_exception(ended.work->error);
        if (ended.is_round) read_round(*ended.work);
    }
    owner_.idle_.ring();
    return Served::Done;
}

std::shared_ptr<Work> NamedLane::own(const NameKey& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return own_.at(key);
}

// Call it before the caller can see that the operation has ended, because it may post the name again at once.
void NamedLane::forget(const NameKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    own_.erase(key);
}

void NamedLane::finish(const NameKey& key, const std::shared_ptr<Work>& work, std::exception_ptr error) {
    forget(key);
    work->finish(std::move(error));
    owner_.idle_.ring();
}

// Puts one operation into the lane's queue: that of one name, or the sum of several.
void NamedLane::carry_out(const std::vector<const Ready*>& ready) {
    UnderWay next;
    std::vector<std::shared_ptr<Work>> parts;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++counts_.operations;
        for (const Ready* one : ready) {
            const auto own = own_.find(one->key);
            if (own == own_.end()) continue;
            own->second->machine.stage = Work::Stage::Posted;
            parts.push_back(own->second);
            next.names.push_back(one->key);
        }
    }
    if (parts.empty()) {
        Request joined;
        joined.kind = OpKind::Join;
        next.work = inner_->prepare(std::move(joined), 0);
        next.work->origin = Work::Origin::JoinedForOnce;
    } else {
        // A work of its own, so that no caller sees its end before the name is free.
        Request request = parts.front()->request;
        for (std::size_t i = 1; i < parts.size(); ++i) {
            const Request& more = parts[i]->request;
            request.pieces.insert(request.pieces.end(), more.pieces.begin(), more.pieces.end());
            request.name += ", " + more.name;
            request.shape.clear();
            request.layout = 0;
        }
        next.work = inner_->prepare(std::move(request), 0);
        next.work->origin = Work::Origin::Names;
        for (const std::shared_ptr<Work>& part : parts) inner_->share_device(*next.work, *part);
        next.work->times.mark = parts.front()->times.mark;
        for (const std::shared_ptr<Work>& part : parts) {
            if (part->deadline != 0 && (next.work->deadline == 0 || part->deadline < next.work->deadline))
                next.work->deadline = part->deadline;
            part->times.blocked = part->machine.since;
            part->times.released = monotonic_ns();
            if (part != parts.front()) inner_->note(*part, Phase::Negotiating);
        }
    }
    push(std::move(next));
}

// Ends the generation, unless an abort has, and the waiting operations.
void NamedLane::fail(std::exception_ptr error) noexcept {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted&) {
    } catch (const std::exception& other) {
        owner_.group_->abort(FixedText("rank %d stopped in its named operations: %s", owner_.rank(), other.what()));
    } catch (...) {
        owner_.group_->abort(FixedText("rank %d stopped in its named operations", owner_.rank()));
    }
    owner_.announce_abort();
    fail_waiting();
}

// Fails all operations that have not begun when the generation has ended: no rank touches their tensors. Those under
// way fail by themselves. Memory may be short.
void NamedLane::fail_waiting() noexcept {
    for (;;) {
        std::shared_ptr<Work> work;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto found = std::find_if(own_.begin(), own_.end(), [&](const auto& one) {
                return !one.second->started() || under_way_.empty();
            });
            if (found == own_.end()) return;
            work = found->second;
            own_.erase(found);
        }
        std::exception_ptr error;
        try {
            error = owner_.stopped(*work, owner_.group_->abort_reason());
        } catch (...) {
            error = std::current_exception();
        }
        work->finish(std::move(error));
        owner_.idle_.ring();
    }
}

// The checks of the lane while operations wait: ranks that have left or died, deadlines, names that some ranks have not
// posted for long.

bool NamedLane::in_round() const {
    return !under_way_.empty() && under_way_.front().is_round &&
           !inner_->group_->released(under_way_.front().work->machine.gate);
}

void NamedLane::check() {
    const std::int64_t now = monotonic_ns();
    if (now < next_check_) return;
    next_check_ = now + kCheckEvery;
    if (owner_.generation_.fabric) owner_.generation_.fabric->notices().read(*owner_.generation_.group);
    if (fabric_) fabric_->notices().read(*owner_.group_);
    if (owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
    if (in_round() || (under_way_.empty() && has_own())) check_members(in_round());
    check_deadlines();
    note_waits(now);
    report_waits();
}

// Reports the operations that not all ranks have posted, as far as the table shows them.
void NamedLane::report_waits() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t left = Standstill::kMost;
    for (const auto& [key, work] : own_) {
        if (work->started() || work->first || left == 0) continue;
        --left;
        work->machine.watched = owner_.generation_.standstill;
        owner_.generation_.standstill->awaits(
            work.get(), StandstillWatch::key_by_name(owner_.log_group_, key.hash, key.joins),
            static_cast<std::uint32_t>(owner_.size()), owner_.awaited_text(*work, kByName));
    }
}

// Fails the lane when a member has left or died before it took part in the round that this rank waits for. Members that
// have never posted a name are not in the lane's own group.
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
        const bool dead = owner_.ring_memory()->dead(local);
        // Checked last, because the member may have arrived just before it left.
        if (in_round && inner_->group_->has_arrived(member, under_way_.front().work->machine.gate)) continue;
        const std::string rank = "rank " + std::to_string(group.ranks()[static_cast<std::size_t>(member)]);
        if (left) blame(rank + " has left (its cell or script ended) while others wait for it");
        if (dead) blame(rank + " has died");
    }
    if (!fabric_) return;
    const std::uint64_t next = inner_ ? inner_->sequence_ + (in_round ? 0 : 1) : 1;
    const std::vector<int> gone = owner_.ranks_of(fabric_->notices().departed(next));
    if (!gone.empty()) blame(rank_list(gone) + " left (cells or scripts ended) while others wait for them");
}

void NamedLane::check_deadlines() {
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> late;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& one : own_)
            if (!one.second->started() && is_past(one.second->deadline)) late.push_back(one);
    }
    for (const auto& [key, work] : late) {
        const std::string text =
            owner_.who() + ": " + title(work->header) + " timed out: " + missing_text(missing(key));
        owner_.group_->abort(text);
        owner_.announce_abort();
        finish(key, work,
               std::make_exception_ptr(Timeout(text + ". Start it on every rank of the group, or raise the timeout.")));
    }
}

// Notes the operation that this rank has waited for longest, for `wait`. When ranks wait too long for a name, the first
// of them prints a warning, once for each name.
void NamedLane::note_waits(std::int64_t now) {
    std::shared_ptr<Work> oldest;
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> stalled;
    NameKey oldest_key;
    const double limit = owner_.group_->options().stall_warning;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [key, work] : own_) {
            if (work->started() || work->first) continue;
            if (!oldest || work->machine.since < oldest->machine.since) {
                oldest = work;
                oldest_key = key;
            }
            if (limit > 0.0 && !work->machine.warned &&
                static_cast<double>(now - work->machine.since) * 1e-9 >= limit) {
                work->machine.warned = true;
                stalled.emplace_back(key, work);
            }
        }
    }
    const auto seconds = [&](const Work& work) { return static_cast<double>(now - work.machine.since) * 1e-9; };
    for (const auto& [key, work] : stalled) {
        const std::vector<int> members = missing(key);
        int first = 0;
        while (std::count(members.begin(), members.end(), first) != 0) ++first;
        if (first != owner_.index() || !reported_.insert(work->request.name).second) continue;
        warn(owner_.who() + ": " + title(work->header) + " has waited " + seconds_text(seconds(*work)) + ": " +
             missing_text(members));
    }
    std::optional<NamedWait> wait;
    if (oldest) wait = NamedWait{oldest->header, seconds(*oldest), owner_.ranks_of(missing(oldest_key))};
    const std::lock_guard<std::mutex> lock(mutex_);
    wait_ = std::move(wait);
}

// Members that have not posted the name, as far as this rank knows: in the current round it sees only the ranks of its
// own host.
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
            if (!lane.has_arrived(member, round.machine.gate)) continue;
            const Header header = lane.header(member, round.header.sequence);
            if (header.is_inline == 0) continue;
            const News news = News::decode(lane.inline_slot(member, round.header.sequence), header.count);
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
    return rank_list(owner_.ranks_of(members)) + " not started it";
}

// The rounds: what this rank sends in one, and what it learns from the other ranks.

namespace {

// Most names that a rank posts in a round: as many as fit its mailbox, so that a round takes one gate.
constexpr std::size_t kMostPosts = 60;
static_assert(kMostPosts * sizeof(Post) < (16 << 10), "the default of RING_INLINE is 16 KiB");

}  // namespace

bool NamedLane::has_news() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!fresh_.empty()) return true;
    // Other ranks may wait for the join, so they must be told.
    if (joins_called_ != told_joins_ && !(own_.empty() && table_.empty())) return true;
    return closing_ && !told_closing_ && !own_.empty();
}

// If one rank's call had more names than another's, it would wait for ever. So the other names of a call are posted
// only when all ranks agree on the first, and thus on the number of names.
void NamedLane::tell_what_follows() {
    std::vector<std::pair<NameKey, std::shared_ptr<Work>>> failed;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t left = following_.size(); left > 0; --left) {
            const NameKey key = std::move(following_.front());
            following_.pop_front();
            const auto own = own_.find(key);
            if (own == own_.end()) continue;  // it has failed meanwhile
            const std::shared_ptr<Work>& work = own->second;
            if (!work->first->launched()) {
                following_.push_back(key);
            } else if (work->first->state() == Work::State::Failed) {
                failed.push_back(*own);
            } else {
                work->first.reset();
                fresh_.push_back(key);
            }
        }
    }
    for (const auto& [key, work] : failed) finish(key, work, work->first->error);
}

NamedLane::Served NamedLane::begin_round() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        News news{joins_called_, 0, owner_.group_->options().fusion_threshold, {}};
        for (; !fresh_.empty() && news.posts.size() < kMostPosts; fresh_.pop_front()) {
            const auto own = own_.find(fresh_.front());
            if (own == own_.end()) continue;  // it has failed meanwhile
            news.posts.push_back({own->second->header, own->first.hash, own->first.joins});
            show_place(own->second->request, news.posts.back().header);
        }
        news.closing = closing_ && fresh_.empty() ? 1 : 0;
        told_joins_ = joins_called_;
        told_closing_ = news.closing != 0;
        news_ = news.encode();
        ++counts_.rounds;
    }
    Request request;
    request.kind = OpKind::Allgather;
    request.dtype = DType::UInt8;
    request.pieces = {{news_.data(), nullptr, news_.size()}};
    request.shape = {static_cast<std::int64_t>(news_.size())};
    request.name = "names";
    const bool begins = !inner_->group_->is_called();
    push({inner_->prepare(std::move(request), 0), {}, true});
    const Served served = inner_->serve_queue();
    if (begins) inner_->group_->wake_all();
    return served == Served::Done ? settle() : Served::Moved;
}

// Writes to the header where a single tensor lies now, for fusion.
void NamedLane::show_place(const Request& request, Header& header) const {
    if (request.pieces.size() != 1 || !in_host_memory(request.device)) return;
    const Piece& piece = request.pieces.front();
    const std::size_t bytes = piece.count * item_size(request.dtype);
    header.input = owner_.ring_memory()->offset_of(piece.input, bytes);
    header.output = owner_.ring_memory()->offset_of(piece.output, bytes);
}

void NamedLane::read_round(const Work& round) {
    std::uint64_t threshold = ~std::uint64_t{0};
    std::vector<Ready> ready;
    std::string hopeless;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::byte* at = round.result.data.get();
        for (std::size_t member = 0; member < round.result.counts.size(); ++member) {
            const auto bytes = static_cast<std::size_t>(round.result.counts[member]);
            const News news = News::decode(at, bytes);
            table_.add(member, news);
            threshold = std::min(threshold, news.threshold);
            at += bytes;
        }
        ready = table_.take_ready();
        std::size_t member = 0;
        if (const Header* header = table_.hopeless(member))
            hopeless = "rank " + std::to_string(owner_.ranks()[member]) +
                       " has left (its cell or script ended) while others wait for it in " + title(*header);
        counts_.names += ready.size();
    }
    for (const auto& operation : plan_fusion(ready, owner_.ranks(), threshold)) {
        std::vector<const Ready*> parts;
        for (std::size_t index : operation) parts.push_back(&ready[index]);
        carry_out(parts);
    }
    if (hopeless.empty()) return;
    owner_.group_->abort(hopeless);
    throw Aborted(owner_.group_->abort_reason());
}

}  // namespace ring
