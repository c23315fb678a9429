// What operations did and when. The last ones are always kept (OperationLog). With a timeline, every phase of them is
// recorded too; off, that costs a load per step; on, a clock and a copy.
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

enum class Phase : std::uint32_t {
    Queued = 0,       // until its turn came
    Packing = 1,      // into the mailbox or ring memory
    Waiting = 2,      // for other ranks; `last` is who came last
    Moving = 3,       // reducing or copying
    Sending = 4,      // the link was at work
    Negotiating = 5,  // until all ranks had posted the name and its turn came
    // Of its callers:
    Held = 6,    // they were in it, or waited for it
    HeldUp = 7,  // the part of that in which other ranks had not come yet
};
const char* to_string(Phase phase);

struct Event {
    std::int64_t begin = 0;  // CLOCK_MONOTONIC, which all processes of a host share
    std::int64_t end = 0;
    Phase phase = Phase::Queued;
    std::int32_t last = -1;  // global rank
    std::uint64_t sequence = 0;
    std::uint64_t bytes = 0;
    std::int32_t group = 0;  // number of the group in its epoch
    OpKind kind = OpKind::Barrier;
    char name[kNameBytes + 3] = {};
};
static_assert(sizeof(Event) % sizeof(std::uint64_t) == 0, "an event is copied as words");

// A ring buffer that any thread writes without a lock; the oldest events give way.
class Recorder {
   public:
    // `log` may be null, in tests of the core alone.
    explicit Recorder(std::shared_ptr<OperationLog> log = nullptr) : log_(std::move(log)) {}
    // Null, or where the last operations are kept.
    const std::shared_ptr<OperationLog>& log() const { return log_; }
    // The group of these ranks, as the log has it: all its members count the groups of the same ranks alike.
    LogGroup log_group(const std::vector<int>& ranks, std::uint64_t epoch, bool whole);
    bool on() const { return ring_.load(std::memory_order_relaxed) != nullptr; }
    // Nanoseconds now, or 0 when off.
    std::int64_t now() const { return on() ? monotonic_ns() : 0; }
    // Ignores an event whose beginning was not seen.
    void record(Phase phase, std::int64_t begin, std::int64_t end, const Header& header, int group, int last);
    // Numbers the groups of an epoch as they come to be, alike on all ranks that are in the same groups.
    int next_group() { return groups_.fetch_add(1, std::memory_order_relaxed); }

    // Nanoseconds that callers have spent in operations, other ranks' lateness included; always counted.
    std::int64_t spent() const { return spent_.load(std::memory_order_relaxed); }

    void spend(std::int64_t ns) { spent_.fetch_add(ns, std::memory_order_relaxed); }
    // The part of them in which other ranks had not come yet.
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
    std::mutex mutex_;
    // One of each capacity that was asked for, kept when a recording ends: a thread may still be writing its last
    // event.
    std::vector<std::unique_ptr<Ring>> rings_;
};

// A caller is in an operation for as long as it lives.
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
