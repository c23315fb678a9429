#include "ring/communicator/named_lane.hpp"

#include <algorithm>
#include <utility>

#include "ring/base/text.hpp"
#include "ring/communicator/device_side.hpp"

namespace ring {
namespace {

std::uint64_t hash_text(const std::string& text) {
    std::uint64_t hash = 1469598103934665603ull;  // FNV-1a
    for (char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
    return hash;
}

}  // namespace

NamedLane::NamedLane(Communicator& owner)
    : owner_(owner),
      fabric_(owner.fabric_ ? owner.fabric_->lane() : nullptr),
      table_(static_cast<std::size_t>(owner.size())) {}

NamedLane::~NamedLane() {
    if (!owner_.domain()->owned()) return;
    if (reserved_) owner_.group_->publish_lane(kClosed);  // before its block goes: nobody enters it any more
    inner_.reset();                                       // what is under way ends with it
    under_way_.clear();
    fail_waiting();
}

void NamedLane::post(const std::shared_ptr<Work>& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const NameKey key{work->header_.name, hash_text(work->request_.name), joins_ended_};
    if (own_.count(key) != 0)
        throw owner_.invalid(work->request_,
                             "an operation of that name is under way; wait for it first, or choose another name");
    work->since_ = monotonic_ns();
    own_.emplace(key, work);
    (work->first_ ? following_ : fresh_).push_back(key);
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
    if (join.error_) return;
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
    const Served flights = inner_ && inner_->device_ ? inner_->device_->serve() : Served::Idle;
    if (flights == Served::Done) owner_.idle_.ring();
    return busy_.load(std::memory_order_acquire) ? std::max(flights, serve_lane()) : flights;
}

NamedLane::Served NamedLane::serve_lane() {
    Served served = Served::Done;
    try {
        if (!under_way_.empty()) {
            served = inner_->serve_queue();
            // What has failed while it was being launched leaves the queue before it ends, which is when its kernel
            // does.
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
    // Only a leader looks at the link: the other ranks of its host see that it waits at the gate.
    const bool leads = fabric_ && owner_.group_->index() == 0;
    const bool called = leads && fabric_->is_called();
    if ((inner_ || open(called)) && (called || inner_->group_->is_called() || has_news())) return begin_round();
    check();
    return leads ? Served::Polling : Served::Blocked;
}

// The rank that first needs the lane reserves its block; the others enter it when it is there.
bool NamedLane::open(bool called) {
    HostGroup& group = *owner_.group_;
    std::unique_ptr<BlockReservation> reservation;
    HostGroup::Members members{{}, group.ranks(), group.index(), 0, 0, group.options()};
    for (int member = 0; member < group.size(); ++member) members.local.push_back(group.local_rank(member));
    if ((called || has_own()) && group.claim_lane()) {
        const Fabric* fabric = fabric_.get();
        reservation =
            std::make_unique<BlockReservation>(owner_.domain(), members.local,
                                               Room{owner_.ranks().size(), group.inline_bytes(), group.segment_bytes(),
                                                    fabric ? owner_.room_for_hosts(*fabric) : 0});
        reserved_ = true;
        group.publish_lane(reservation->offset());
    }
    const std::uint64_t block = group.lane();
    if (block == kNowhere || block == kClaimed) return false;
    auto lane = std::make_shared<HostGroup>(owner_.domain(), block, std::move(members), std::move(reservation),
                                            owner_.epoch_.group, &group);
    const std::lock_guard<std::mutex> lock(mutex_);
    inner_.reset(new Communicator(owner_, std::move(lane), fabric_));
    return true;
}

void NamedLane::push(UnderWay next) {
    {
        const std::lock_guard<std::mutex> lock(inner_->mutex_);
        inner_->queue_.push_back(next.work);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.push_back(std::move(next));
    ++begun_;
}

// What has ended goes back to those who wait for it.
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
            if (ended.names.size() == 1) work->result_ = std::move(ended.work->result_);
            finish(key, work, ended.work->error_);
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            under_way_.pop_front();
        }
        if (ended.is_round && owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
        if (ended.is_round && ended.work->error_) std::rethrow_exception(ended.work->error_);
        if (ended.is_round) read_round(*ended.work);
    }
    owner_.idle_.ring();
    return Served::Done;
}

std::shared_ptr<Work> NamedLane::own(const NameKey& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return own_.at(key);
}

// Before the caller of an operation can know that it has ended: it may post the name again at once.
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
            own->second->started_ = true;
            parts.push_back(own->second);
            next.names.push_back(one->key);
        }
    }
    if (parts.empty()) {
        Request joined;
        joined.kind = OpKind::Join;
        next.work = inner_->prepare(std::move(joined), 0);
        next.work->joined_for_once_ = true;
    } else {
        // Of its own, so that nobody can see the end of it before its name is free.
        Request request = parts.front()->request_;
        for (std::size_t i = 1; i < parts.size(); ++i) {
            const Request& more = parts[i]->request_;
            request.pieces.insert(request.pieces.end(), more.pieces.begin(), more.pieces.end());
            request.name += ", " + more.name;
            request.shape.clear();
            request.layout = 0;
        }
        next.work = inner_->prepare(std::move(request), 0);
        next.work->by_name_ = true;
        for (const std::shared_ptr<Work>& part : parts) inner_->share_device(*next.work, *part);
        next.work->mark_ = parts.front()->mark_;
        for (const std::shared_ptr<Work>& part : parts) {
            if (part->deadline_ != 0 && (next.work->deadline_ == 0 || part->deadline_ < next.work->deadline_))
                next.work->deadline_ = part->deadline_;
            part->blocked_ = part->since_;
            part->released_ = monotonic_ns();
            if (part != parts.front()) inner_->note(*part, Phase::Negotiating);
        }
    }
    push(std::move(next));
}

// Ends the epoch, unless an abort has, and with it what waits.
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

// All operations that have not begun, of an epoch that has ended: nobody touches their tensors. Those under way fail by
// themselves. There may be no memory.
void NamedLane::fail_waiting() noexcept {
    for (;;) {
        std::shared_ptr<Work> work;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto found = std::find_if(
                own_.begin(), own_.end(), [&](const auto& one) { return !one.second->started_ || under_way_.empty(); });
            if (found == own_.end()) return;
            work = found->second;
            own_.erase(found);
        }
        std::exception_ptr error;
        try {
            error = std::make_exception_ptr(Aborted(owner_.who() + ": " + title(work->header_) + " stopped because " +
                                                    owner_.group_->abort_reason()));
        } catch (...) {
            error = std::current_exception();
        }
        work->finish(std::move(error));
        owner_.idle_.ring();
    }
}

}  // namespace ring
