#include "ring/base/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <mutex>

namespace ring {

// Not FUTEX_PRIVATE: the word may be mapped by several processes.
void Doorbell::wake() noexcept {
    rings.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(Doorbell& bell, std::uint32_t seen, std::chrono::microseconds limit) {
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(limit.count() / 1'000'000);
    timeout.tv_nsec = static_cast<long>(limit.count() % 1'000'000) * 1000;
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell.rings), FUTEX_WAIT, seen,
            limit == kForever ? nullptr : &timeout, nullptr, 0);
}

namespace {

std::int64_t read_clock(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

std::int64_t monotonic_ns() { return read_clock(CLOCK_MONOTONIC); }

std::int64_t wall_clock_ns() { return read_clock(CLOCK_REALTIME); }

namespace {

std::mutex holding;                        // one thread holds or releases at a time; any thread may read
std::atomic<std::int64_t> held_since{0};   // 0: deadlines are not held
std::atomic<std::int64_t> held_before{0};  // ns

std::atomic<std::int64_t> used_by_waits{0};  // ns, of all threads of this process

}  // namespace

std::int64_t cpu_besides_waits() {
    return read_clock(CLOCK_PROCESS_CPUTIME_ID) - used_by_waits.load(std::memory_order_relaxed);
}

void WaitMeter::count() noexcept {
    const std::int64_t cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
    if (next_ != 0) used_by_waits.fetch_add(cpu - cpu_, std::memory_order_relaxed);
    cpu_ = cpu;
}

std::int64_t deadline_now() {
    // In this order, so that a hold that ends in between may count twice for a moment, but is never missed.
    const std::int64_t since = held_since.load(std::memory_order_acquire);
    return (since != 0 ? since : monotonic_ns()) - held_before.load(std::memory_order_acquire);
}

void hold_deadlines(bool hold) {
    const std::lock_guard<std::mutex> lock(holding);
    const std::int64_t since = held_since.load(std::memory_order_acquire);
    if (hold == (since != 0)) return;
    if (!hold) held_before.fetch_add(monotonic_ns() - since, std::memory_order_acq_rel);
    held_since.store(hold ? monotonic_ns() : 0, std::memory_order_release);
}

std::int64_t deadline_after(double seconds) {
    const std::int64_t now = deadline_now();
    const double ns = seconds * 1e9;
    // A time that the clock cannot represent, or infinity, means never.
    return ns > 0 && ns < static_cast<double>(INT64_MAX - now) ? now + static_cast<std::int64_t>(ns) : 0;
}

void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void cpu_yield() { sched_yield(); }

}  // namespace ring
