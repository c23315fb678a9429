#include "kernels/kernel_table.hpp"

namespace ring {

const KernelTable& kernels_baseline() {
    static constexpr KernelTable table = make_table("baseline");
    return table;
}

}  // namespace ring
