// Which operations NCCL carries out as exactly as the core, and the arguments it gets for them.
#pragma once

#include <cstdint>
#include <optional>

#include "ring/device/nccl.hpp"
#include "ring/group/header.hpp"

namespace ring {

struct NcclReduction {
    int op = 0;                // NCCL's number
    bool scaled = false;       // a sum of what each rank has multiplied with `factor`
    std::uint64_t factor = 0;  // its bits, as a number of the tensors' type
};

// How NCCL reduces the operation of that header among `size` ranks. None where it cannot, or would round where the core
// does not: types that NCCL lacks, averages and factors of integers, factors that are inexact in the tensors' type.
std::optional<NcclReduction> nccl_reduction_for(const Header& header, int size);

}  // namespace ring
