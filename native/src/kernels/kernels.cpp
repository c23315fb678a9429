#include "ring/kernels/kernels.hpp"

#include <atomic>

#include "ring/base/errors.hpp"

namespace ring {
namespace {

// The tables that this processor can run, the best first.
struct Usable {
    Usable() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 =
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        if (avx512) tables[count++] = &kernels_avx512();
        if (avx2) tables[count++] = &kernels_avx2();
#endif
        tables[count++] = &kernels_baseline();
    }
    const KernelTable* tables[3] = {};
    int count = 0;
};

const Usable& usable() {
    static const Usable all;
    return all;
}

// One for the process, because a processor has one best table.
std::atomic<const KernelTable*>& selected() {
    static std::atomic<const KernelTable*> table{usable().tables[0]};
    return table;
}

}  // namespace

const KernelTable& kernels() { return *selected().load(std::memory_order_relaxed); }

const KernelTable& select_kernels(const std::string& isa) {
    if (!isa.empty() && isa != "baseline" && isa != "avx2" && isa != "avx512")
        throw InvalidArgument("there are no kernels for '" + isa + "'; the choices are baseline, avx2 and avx512");
    const KernelTable* table = usable().tables[0];
    for (int i = 0; i < usable().count; ++i)
        if (isa == usable().tables[i]->isa) table = usable().tables[i];
    selected().store(table, std::memory_order_relaxed);
    return *table;
}

}  // namespace ring
