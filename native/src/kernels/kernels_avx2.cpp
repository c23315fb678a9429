#if defined(__x86_64__)

#include "kernels/kernel_table.hpp"

namespace ring {

const KernelTable& kernels_avx2() {
    static constexpr KernelTable table = make_table("avx2");
    return table;
}

}  // namespace ring

#endif
