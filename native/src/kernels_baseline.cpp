#include "adasum_impl.hpp"
#include "kernels_impl.hpp"
#include "update_impl.hpp"

namespace ring {

const KernelTable& kernels_baseline() {
    static constexpr KernelTable table = RING_KERNEL_TABLE("baseline");
    return table;
}

}  // namespace ring
