#if defined(__x86_64__)

#include "kernels/kernel_table.hpp"

namespace ring {

const KernelTable& kernels_avx512() {
    static constexpr KernelTable table = make_table("avx512");
    return table;
}

}  // namespace ring

#endif
