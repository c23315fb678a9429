// What operations did and when. The last ones are always kept (OperationLog). With a timeline, every phase is recorded
// too: a clock read and a copy per step, or one load when off. Operations and messages share one recorder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ring/group/header.hpp"
#include "ring/group/operation_log.hpp"

namespace ring {

// Queued: until its turn came. Packing: into the mailbox or ring memory. Waiting: until all ranks had called it; `last`
// came last. Moving: reducing or copying, and waiting for more of the data. Sending: the link was at work.
// Negotiating: until all ranks had posted the name and its turn came. Held: while its callers were in it or waited for
// it. HeldUp: the part of Held in which other ranks had not come yet.
#define RING_PHASES(X)            \
    X(Queued, "queued")           \
    X(Packing, "packing")         \
    X(Waiting, "waiting")         \
    X(Moving, "moving")           \
    X(Sending, "sending")         \
    X(Negotiating, "negotiating") \
    X(Held, "held")               \
    X(HeldUp, "held up")
RING_ENUM(Phase, std::uint32_t, RING_PHASES);

struct Event {
    std::int64_t begin = 0;  // CLOCK_MONOTONIC, which all processes of a host share
    std::int64_t end = 0;
    Phase phase = Phase::Queued;
    std::int32_t last = -1;  // global rank
    std::uint64_t sequence = 0;
    std::uint64_t bytes = 0;
    std::int32_t group = 0;  // number of the group in its generation
    OpKind kind = OpKind::Barrier;
    char name[kNameBytes + 3] = {};
};
static_assert(sizeof(Event) % sizeof(std::uint64_t) == 0, "an event is copied as words");

// What the recorder keeps of one operation until that ends.
struct OperationTimes {
    std::shared_ptr<OperationLog> log;  // of its record; null where it has none
    std::uint64_t record = 0;
    std::int64_t mark = 0;      // when the present phase began; 0 while no timeline is recorded
    std::int64_t blocked = 0;   // when it began to wait for other ranks; 0 when all had come before
    std::int64_t released = 0;  // when all had come
    int last = -1;              // the rank that came last to its first gate; only while a timeline is recorded

    void block() { blocked = blocked == 0 ? monotonic_ns() : blocked; }
    // The others can see it from now on, under the sequence of the header.
    void arrive(const Header& header) const noexcept {
        if (log) log->arrive(record, header, monotonic_ns());
    }
    // The line that has called it.
    void set_site(std::uint32_t site) const noexcept {
        if (log) log->set_site(record, site);
    }
    void end(bool done) const noexcept {
        if (log) log->end(record, monotonic_ns(), done);
    }
};

// Any thread writes to it without a lock; a full timeline drops its oldest events.
class Recorder {
   public:
    // `log` may be null, in tests of the core alone.
    explicit Recorder(std::shared_ptr<OperationLog> log = nullptr) : log_(std::move(log)) {}
    // Null, or where the last operations are kept.
    const std::shared_ptr<OperationLog>& log() const { return log_; }
    // An operation of that group is called.
    void call(OperationTimes& times, const Header& header, const LogGroup& group, std::uint32_t site) const {
        if (log_ == nullptr) return;
        times.log = log_;
        times.record = log_->begin(header, group, monotonic_ns(), 0, site);
    }
    // It begins its first phase.
    void begin_phase(OperationTimes& times) {
        calls_.fetch_add(1, std::memory_order_relaxed);
        times.mark = on() ? monotonic_ns() : 0;
    }
    // A number that grows whenever this rank calls an operation or sends a message.
    std::uint64_t calls() const {
        return calls_.load(std::memory_order_relaxed) + posted() + (log_ ? log_->calls() : 0);
    }
    // Its present phase ends, and the next one begins.
    void end_phase(OperationTimes& times, Phase phase, const Header& header, int group, int last = -1) {
        const std::int64_t now = on() ? monotonic_ns() : 0;
        record(phase, times.mark, now, header, group, last);
        times.mark = now;
    }
    // It has ended; its caller has been in it, or has waited for it, since `begin`. Adds the part of that time in which
    // it waited for late ranks, before any data moved.
    void end_call(const OperationTimes& times, std::int64_t begin, const Header& header, int group);
    // The group of these ranks in the log; all members count the groups of the same ranks alike.
    LogGroup log_group(const std::vector<int>& ranks, std::uint64_t generation, bool whole);
    bool on() const { return ring_.load(std::memory_order_relaxed) != nullptr; }
    // Numbers the groups of a generation as they are created, alike on ranks that are in the same groups.
    int next_group() { return groups_.fetch_add(1, std::memory_order_relaxed); }

    // Nanoseconds that callers have spent in operations, including waits for late ranks; always counted.
    std::int64_t spent() const { return spent_.load(std::memory_order_relaxed); }
    void spend(std::int64_t ns) { spent_.fetch_add(ns, std::memory_order_relaxed); }
    // The part of `spent` in which other ranks had not come yet.
    std::int64_t waited() const { return waited_.load(std::memory_order_relaxed); }
    void add_waited(std::int64_t ns) {
        if (ns > 0) waited_.fetch_add(ns, std::memory_order_relaxed);
    }

    // Bytes of the tensors in operations that this rank has posted, in all groups; always counted.
    std::uint64_t posted() const { return posted_.load(std::memory_order_relaxed); }
    void add_posted(std::uint64_t bytes) { posted_.fetch_add(bytes, std::memory_order_relaxed); }

    // Keeps the newest `capacity` events. Leaves a recording that is under way as it is.
    void start(std::size_t capacity);
    // The events since it began, or since the last call, in the order in which they ended. The recording continues.
    std::vector<Event> take();
    // Ends the recording and gives the events that `take` has not.
    std::vector<Event> stop();

   private:
    struct Ring;
    // Ignores an event whose beginning was not seen.
    void record(Phase phase, std::int64_t begin, std::int64_t end, const Header& header, int group, int last);
    static std::vector<Event> events_of(Ring& ring, bool ended);
    struct Slot {
        std::atomic<std::uint64_t> filled{0};  // 1 + number of the event it holds
        SharedCopy<Event> event;
    };
    struct Ring {
        explicit Ring(std::size_t size) : capacity(size), slots(new Slot[size]) {}
        const std::size_t capacity;
        const std::unique_ptr<Slot[]> slots;
        std::atomic<std::uint64_t> next{0};  // number of an event, never that of one in an earlier recording
        std::uint64_t first = 0;             // the next to be given; under the mutex
    };
    const std::shared_ptr<OperationLog> log_;
    std::map<std::uint64_t, std::uint64_t> same_ranks_;  // groups of these ranks so far; under the mutex
    std::atomic<Ring*> ring_{nullptr};                   // null when off
    std::atomic<int> groups_{0};
    std::atomic<std::int64_t> spent_{0};
    std::atomic<std::int64_t> waited_{0};
    std::atomic<std::uint64_t> posted_{0};
    std::atomic<std::uint64_t> calls_{0};
    std::mutex mutex_;
    // One of each capacity that was asked for, kept when a recording ends: a thread may still be writing its last
    // event.
    std::vector<std::unique_ptr<Ring>> rings_;
};

// Counts its lifetime as time that a caller spends in operations.
class Spending {
   public:
    explicit Spending(Recorder& recorder) : recorder_(recorder), begin_(monotonic_ns()) {}
    ~Spending() { recorder_.spend(monotonic_ns() - begin_); }
    std::int64_t begin() const { return begin_; }
    Spending(const Spending&) = delete;
    Spending& operator=(const Spending&) = delete;

   private:
    Recorder& recorder_;
    std::int64_t begin_;
};

}  // namespace ring
