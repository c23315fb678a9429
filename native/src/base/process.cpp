#include "ring/base/process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace ring {
namespace {

// Forks between this process and the one that loaded this library.
std::atomic<std::uint32_t> forks{0};
const bool kForksAreCounted =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }) == 0;

}  // namespace

Owner::Owner() : pid_(getpid()), forks_(forks.load(std::memory_order_relaxed)) {}

bool Owner::is_this_process() const {
    return kForksAreCounted ? forks.load(std::memory_order_relaxed) == forks_ : pid_ == getpid();
}

}  // namespace ring
