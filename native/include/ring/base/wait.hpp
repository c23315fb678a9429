// The one place in the core that waits.
//
// A wait spins for a short while and then sleeps on a futex. It ends when its condition holds; every kSleep it
// wakes to run `idle`, which throws on a deadline, a signal, an abort or a dead peer.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "ring/base/shared_atomic.hpp"

namespace ring {

// Lives in ring memory (woken by other processes) or on the heap (woken by another thread).
struct alignas(64) Doorbell {
    SharedAtomic<std::uint32_t> rings{0};
    SharedAtomic<std::uint32_t> sleepers{0};

    // Wakes the thread that sleeps here. Costs one load when none does.
    void ring() noexcept {
        if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
    }

   private:
    void wake() noexcept;
};

class Sleeper {
   public:
    explicit Sleeper(Doorbell& bell) : bell_(bell) { bell_.sleepers.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

   private:
    Doorbell& bell_;
};

constexpr std::chrono::microseconds kSleep{50'000};
// A network cannot wake a waiting thread, so the thread polls it: without a pause for kPollSpin, then every kPoll. A
// sleeping thread wakes some 100 µs late, and its stream stands still meanwhile.
constexpr std::chrono::microseconds kPoll{50};
constexpr std::chrono::microseconds kPollSpin{1000};

struct SpinPolicy {
    std::chrono::nanoseconds budget{50'000};
    // With more ranks than cores a spinning rank keeps the one it waits for from running.
    bool yield = false;

    // For polls that are system calls, on cores that the threads which move the data may need.
    SpinPolicy polling() const { return {std::max<std::chrono::nanoseconds>(budget, kPollSpin), true}; }
};

constexpr std::chrono::microseconds kForever{-1};

// Sleeps until the bell rings after `seen` was read, a signal arrives or the limit passes.
void sleep_on(Doorbell& bell, std::uint32_t seen, std::chrono::microseconds limit);

std::int64_t monotonic_ns();
std::int64_t wall_clock_ns();
// How often a waiting thread checks what does not wake it: signals, deaths, deadlines, notices of other hosts.
constexpr std::int64_t kCheckEvery = 50'000'000;  // ns
// The clock of all deadlines of this process. It stops while deadlines are held: while a user has stopped a rank in a
// debugger, the other ranks wait for it without a time limit.
std::int64_t deadline_now();
void hold_deadlines(bool hold);
// The time that many seconds from now; 0, which means never, for 0 and for more than the clock can count.
std::int64_t deadline_after(double seconds);
inline bool is_past(std::int64_t deadline) { return deadline != 0 && deadline_now() > deadline; }
void cpu_pause();
void cpu_yield();

// CPU time of this process in ns, without that of its waits.
std::int64_t cpu_besides_waits();

// Counts the CPU time of the calling thread while it waits.
class WaitMeter {
   public:
    ~WaitMeter() {
        if (next_ != 0) count();
    }
    // Call it during a wait that lasts: it reads the thread's CPU clock now and then.
    void tick() {
        if (const std::int64_t now = monotonic_ns(); now >= next_) {
            count();
            next_ = now + kCheckEvery;
        }
    }

   private:
    void count() noexcept;

    std::int64_t next_ = 0;  // 0 before the first look
    std::int64_t cpu_ = 0;
};

template <class Ready>
bool spin_until(const SpinPolicy& policy, Ready&& ready) {
    if (ready()) return true;
    const std::int64_t end = monotonic_ns() + policy.budget.count();
    do {
        for (int i = 0; i < (policy.yield ? 1 : 64); ++i) {
            if (policy.yield) {
                cpu_yield();
            } else {
                cpu_pause();
            }
            if (ready()) return true;
        }
    } while (monotonic_ns() < end);
    return false;
}

// `ready` must load what it reads with seq_cst or after an acquire that follows the store it waits for: the
// thread that makes the condition true stores it with seq_cst and then rings the bell, so that no wake-up is lost.
template <class Ready, class Idle>
void wait_until(Doorbell& bell, const SpinPolicy& policy, Ready&& ready, Idle&& idle,
                std::chrono::microseconds tick = kSleep) {
    if (spin_until(policy, ready)) return;
    WaitMeter meter;
    for (;;) {
        {
            const Sleeper sleeper(bell);  // `ready` may throw
            const std::uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
            if (ready()) return;
            sleep_on(bell, seen, tick);
        }
        if (ready()) return;
        meter.tick();
        idle();
    }
}

}  // namespace ring
