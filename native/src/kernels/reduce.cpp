#include "ring/kernels/reduce.hpp"

#include <cstdlib>
#include <cstring>

namespace ring {
namespace {

const KernelTable& choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const char* asked = std::getenv("RING_ISA");
    if (asked != nullptr && *asked != '\0') {
        if (std::strcmp(asked, "baseline") == 0) return kernels_baseline();
        if (std::strcmp(asked, "avx2") == 0 && avx2) return kernels_avx2();
    }
    if (avx512 && (asked == nullptr || std::strcmp(asked, "avx2") != 0)) return kernels_avx512();
    if (avx2) return kernels_avx2();
#endif
    return kernels_baseline();
}

}  // namespace

const KernelTable& kernels() {
    static const KernelTable& table = choose();
    return table;
}

}  // namespace ring
