#include "kernels/adasum_impl.hpp"
#include "kernels/kernels_impl.hpp"
#include "kernels/update_impl.hpp"

namespace ring {

const KernelTable& kernels_baseline() {
    static constexpr KernelTable table = RING_KERNEL_TABLE("baseline");
    return table;
}

}  // namespace ring
