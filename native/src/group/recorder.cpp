#include "ring/group/recorder.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "ring/base/errors.hpp"
#include "ring/base/hash.hpp"

namespace ring {

void Recorder::record(Phase phase, std::int64_t begin, std::int64_t end, const Header& header, int group, int last) {
    Ring* ring = ring_.load(std::memory_order_acquire);
    if (ring == nullptr || begin == 0 || end == 0) return;
    Event event;
    event.begin = begin;
    event.end = end;
    event.phase = phase;
    event.last = last;
    event.sequence = header.sequence;
    event.group = group;
    event.bytes = header.count * item_size(header.dtype);
    event.kind = header.kind;
    std::memcpy(event.name, header.name, kNameBytes);
    const std::uint64_t number = ring->next.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = ring->slots[number % ring->capacity];
    slot.filled.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // a reader of a word of this event sees that the old one went
    slot.event.store(event);
    slot.filled.store(number + 1, std::memory_order_release);
}

void Recorder::end_call(const OperationTimes& times, std::int64_t begin, const Header& header, int group) {
    if (on()) record(Phase::Held, begin, monotonic_ns(), header, group, -1);
    const std::int64_t from = std::max(times.blocked, begin);
    if (times.blocked == 0 || times.released <= from) return;
    add_waited(times.released - from);
    record(Phase::HeldUp, from, times.released, header, group, times.last);
}

LogGroup Recorder::log_group(const std::vector<int>& ranks, std::uint64_t generation, bool whole) {
    LogGroup group{0, static_cast<std::uint32_t>(ranks.size()), static_cast<std::uint32_t>(generation)};
    if (!whole) {
        const std::uint64_t hash = hash_of(ranks);
        const std::lock_guard<std::mutex> lock(mutex_);
        group.id = (hash ^ ++same_ranks_[hash] << 1) | 1;
    }
    if (log_ == nullptr) return group;
    std::string members;
    for (int rank : ranks) members += (members.empty() ? "" : " ") + std::to_string(rank);
    // So the log names the group of a rank that calls nothing in it too.
    log_->note((whole ? "generation of " : "group of ") + members, group, 0);
    return group;
}

void Recorder::start(std::size_t capacity) {
    if (capacity == 0) throw InvalidArgument("a recording keeps at least one event; its capacity is 0");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on()) return;
    auto known =
        std::find_if(rings_.begin(), rings_.end(), [&](const auto& ring) { return ring->capacity == capacity; });
    if (known == rings_.end()) known = rings_.insert(known, std::make_unique<Ring>(capacity));
    Ring& ring = **known;
    ring.first = ring.next.load(std::memory_order_relaxed);
    ring_.store(&ring, std::memory_order_release);
}

std::vector<Event> Recorder::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Ring* ring = ring_.load(std::memory_order_acquire);
    return ring == nullptr ? std::vector<Event>() : events_of(*ring, false);
}

std::vector<Event> Recorder::stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Ring* ring = ring_.exchange(nullptr, std::memory_order_acq_rel);
    return ring == nullptr ? std::vector<Event>() : events_of(*ring, true);
}

// Under the mutex. An event that is being written is left to the next call, and lost when the recording has ended.
std::vector<Event> Recorder::events_of(Ring& ring, bool ended) {
    std::vector<Event> events;
    const std::uint64_t end = ring.next.load(std::memory_order_acquire);
    const std::uint64_t oldest = end > ring.capacity ? end - ring.capacity : 0;
    for (ring.first = std::max(ring.first, oldest); ring.first < end; ++ring.first) {
        const std::uint64_t wanted = ring.first + 1;
        const Slot& slot = ring.slots[ring.first % ring.capacity];
        const std::uint64_t filled = slot.filled.load(std::memory_order_acquire);
        if (filled < wanted && !ended) break;
        if (filled != wanted) continue;
        const Event event = slot.event.load();
        std::atomic_thread_fence(std::memory_order_acquire);
        if (slot.filled.load(std::memory_order_relaxed) == wanted) events.push_back(event);
    }
    return events;
}

}  // namespace ring
