#include "ring/recorder.hpp"

#include <cstring>

namespace ring {

const char* to_string(Phase phase) {
    static constexpr const char* names[] = {"queued", "packing", "waiting", "moving", "sending"};
    return names[static_cast<int>(phase)];
}

void Recorder::record(Phase phase, std::int64_t begin, std::int64_t end, const Header& header, int group, int last) {
    if (!on() || begin == 0 || end == 0) return;
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
    const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_.load(std::memory_order_acquire)[number % capacity_.load(std::memory_order_relaxed)];
    slot.filled.store(0, std::memory_order_relaxed);
    slot.event.store(event);
    slot.filled.store(number + 1, std::memory_order_release);
}

void Recorder::start(std::size_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on()) return;
    if (!memory_) {
        memory_ = std::make_unique<Slot[]>(capacity);
        slots_.store(memory_.get(), std::memory_order_release);
        capacity_.store(capacity, std::memory_order_relaxed);
    }
    for (std::size_t i = 0; i < capacity_.load(); ++i) slots_.load()[i].filled.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    on_.store(true, std::memory_order_release);
}

std::vector<Event> Recorder::stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Event> events;
    if (!on_.exchange(false, std::memory_order_acq_rel)) return events;
    const std::size_t capacity = capacity_.load();
    const std::uint64_t end = next_.load(std::memory_order_acquire);
    for (std::uint64_t number = end > capacity ? end - capacity : 0; number < end; ++number) {
        Slot& slot = slots_.load()[number % capacity];
        if (slot.filled.load(std::memory_order_acquire) == number + 1) events.push_back(slot.event.load());
    }
    return events;
}

}  // namespace ring
