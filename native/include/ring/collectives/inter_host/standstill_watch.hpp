// Detects that no rank of a generation can continue (ring/group/standstill.hpp), and ends the generation as a mismatch.
//
// A rank stands still when a thread of its program is in an operation, everything under way waits for calls of other
// ranks, it has called nothing for some seconds, and its other threads sleep. Then nothing that this core can see will
// make its next call. The first rank of each host collects, and the first of all judges.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "ring/collectives/inter_host/fabric.hpp"
#include "ring/group/host_group.hpp"
#include "ring/group/recorder.hpp"

namespace ring {

class StandstillWatch {
   public:
    // `fabric` is null on one host; 0 `seconds` watch nothing.
    StandstillWatch(std::shared_ptr<HostGroup> generation, std::shared_ptr<Fabric> fabric,
                    std::shared_ptr<const Recorder> recorder, double seconds);

    // Any thread, every 50 ms: a thread of the program is in an operation, or waits for one.
    void program_waits() noexcept { program_.store(monotonic_ns(), std::memory_order_relaxed); }
    // `operation`, described by `text`, waits for calls; `key` is the same on all `needed` ranks that have to call it.
    void awaits(const void* operation, std::uint64_t key, std::uint32_t needed, const std::string& text);
    // The operation needs no further call.
    void moves(const void* operation);
    // The operation has ended.
    void forget(const void* operation) noexcept;

    // The key of an operation of that group which matches by order, or by name.
    static std::uint64_t key_by_order(const LogGroup& group, std::uint64_t sequence);
    static std::uint64_t key_by_name(const LogGroup& group, std::uint64_t name, std::uint64_t joins);

   private:
    struct Entry {
        Awaited awaited;  // `needed` is 0 where it moves
        std::int64_t seen = 0;
    };
    void note(const void* operation, const Entry& entry);
    void look(std::int64_t now);
    Standstill standstill(std::int64_t now);
    void collect(std::int64_t now);

    const std::shared_ptr<HostGroup> generation_;
    const std::shared_ptr<Fabric> fabric_;
    const std::shared_ptr<const Recorder> recorder_;
    const std::int64_t limit_;  // ns
    std::atomic<std::int64_t> program_{0};

    std::mutex mutex_;
    std::map<const void*, Entry> entries_;
    std::int64_t next_look_ = 0;
    std::uint64_t state_ = 0;  // a hash of all that is waited for, and of the calls so far
    std::int64_t since_ = 0;   // when `state_` last changed, on the clock of deadlines
    std::int64_t worked_ = 0;  // `cpu_besides_waits` then
    std::int64_t told_ = 0;    // when the first host was last told
};

}  // namespace ring
