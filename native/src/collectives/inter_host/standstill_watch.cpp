#include "ring/collectives/inter_host/standstill_watch.hpp"

#include <utility>

#include "ring/base/hash.hpp"

namespace ring {
namespace {

constexpr std::int64_t kLookEvery = 4 * kCheckEvery;
constexpr std::int64_t kFresh = 40 * kCheckEvery;  // a thread may get no processor for that long
constexpr std::int64_t kTellEvery = 20 * kCheckEvery;

// A rank sleeps if it uses at most 1/20 of a core, not counting its waits.
constexpr std::int64_t kAsleep = 20;

std::uint64_t key_of(std::initializer_list<std::uint64_t> parts) { return hash_of(parts) | 1; }

}  // namespace

StandstillWatch::StandstillWatch(std::shared_ptr<HostGroup> generation, std::shared_ptr<Fabric> fabric,
                                 std::shared_ptr<const Recorder> recorder, double seconds)
    : generation_(std::move(generation)),
      fabric_(std::move(fabric)),
      recorder_(std::move(recorder)),
      limit_(static_cast<std::int64_t>(seconds * 1e9)) {}

std::uint64_t StandstillWatch::key_by_order(const LogGroup& group, std::uint64_t sequence) {
    return key_of({group.id, 1, sequence});
}

std::uint64_t StandstillWatch::key_by_name(const LogGroup& group, std::uint64_t name, std::uint64_t joins) {
    return key_of({group.id, 2, name, joins});
}

void StandstillWatch::awaits(const void* operation, std::uint64_t key, std::uint32_t needed, const std::string& text) {
    Standstill one;
    one.add(key, needed, text);
    note(operation, {one.awaited[0], 0});
}

void StandstillWatch::moves(const void* operation) { note(operation, {}); }

void StandstillWatch::forget(const void* operation) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.erase(operation);
}

void StandstillWatch::note(const void* operation, const Entry& entry) {
    if (limit_ == 0 || generation_->aborted()) return;
    const std::int64_t now = monotonic_ns();
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& known = entries_[operation];
    known = entry;
    known.seen = now;
    if (now >= next_look_) look(now);
}

void StandstillWatch::look(std::int64_t now) {
    next_look_ = now + kLookEvery;
    const Standstill one = standstill(now);
    if (one.count == 0) return;
    generation_->show_standstill(one);
    if (generation_->index() == 0) collect(now);
}

// What this rank waits for, once it stands still.
Standstill StandstillWatch::standstill(std::int64_t now) {
    Standstill all;
    all.shown = now;
    bool moving = false;
    std::uint64_t state = recorder_->calls();
    for (auto one = entries_.begin(); one != entries_.end();) {
        const Entry& entry = one->second;
        if (now - entry.seen > kFresh) {
            one = entries_.erase(one);
            continue;
        }
        moving |= entry.awaited.needed == 0;
        state = key_of({state, reinterpret_cast<std::uintptr_t>(one->first), entry.awaited.key});
        all.add(entry.awaited.key, entry.awaited.needed, entry.awaited.text);
        ++one;
    }
    if (moving || all.count == 0 || now - program_.load(std::memory_order_relaxed) > kFresh) state = 0;
    if (state == 0 || state != state_) {
        state_ = state;
        since_ = deadline_now();
        worked_ = cpu_besides_waits();
        return {};
    }
    const std::int64_t passed = deadline_now() - since_;
    return passed >= limit_ && (cpu_besides_waits() - worked_) * kAsleep <= passed ? all : Standstill{};
}

// Called by the first rank of a host.
void StandstillWatch::collect(std::int64_t now) {
    StandingRanks ranks;
    if (!generation_->all_stand_still(ranks, now - kFresh)) return;
    if (fabric_ && fabric_->host() != 0) {
        if (now - told_ < kTellEvery) return;
        told_ = now;
        fabric_->notices().tell_standstill(ranks.encode());
        return;
    }
    if (fabric_ && !fabric_->notices().all_stand_still(ranks, now - kFresh - kTellEvery)) return;
    const std::string why = ranks.mismatch();
    if (!why.empty()) generation_->abort(why, true);
}

}  // namespace ring
