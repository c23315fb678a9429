#include "ring/memory/freed_memory.hpp"

#include <climits>
#include <initializer_list>

#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/resource.h>
#endif

namespace ring {

#if defined(__GLIBC__)
namespace {

// Heaps take more addresses than their blocks, so under a limit on addresses a request that fits could fail.
bool has_any_addresses() {
    for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
        struct rlimit limit{};
        if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;
    }
    return true;
}

}  // namespace

bool keep_freed_memory() noexcept {
    if (!has_any_addresses()) return false;
    // No block is mapped alone, because such a block is unmapped when it is freed. The end of the heap stays, up to the
    // largest value that mallopt takes. The pad keeps the heaps of threads, which have 64 MiB each, when they are free.
    return mallopt(M_MMAP_MAX, 0) != 0 && mallopt(M_TRIM_THRESHOLD, INT_MAX) != 0 && mallopt(M_TOP_PAD, 256 << 20) != 0;
}

void return_freed_memory() noexcept { malloc_trim(0); }
#else
bool keep_freed_memory() noexcept { return false; }
void return_freed_memory() noexcept {}
#endif

}  // namespace ring
