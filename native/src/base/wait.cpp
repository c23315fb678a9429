#include "ring/base/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>

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

std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::int64_t deadline_after(double seconds) {
    const std::int64_t now = monotonic_ns();
    const double ns = seconds * 1e9;
    // What the clock cannot count to, infinity among it, lies centuries away.
    return ns > 0 && ns < static_cast<double>(INT64_MAX - now) ? now + static_cast<std::int64_t>(ns) : 0;
}

std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
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
