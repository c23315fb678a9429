#if defined(__x86_64__)

#include "kernels/adasum_impl.hpp"
#include "kernels/kernels_impl.hpp"
#include "kernels/update_impl.hpp"

namespace ring {

const KernelTable& kernels_avx512() {
    static constexpr KernelTable table = RING_KERNEL_TABLE("avx512");
    return table;
}

}  // namespace ring

#endif
