// Which operations NCCL carries out as exactly as the core does, and how it is asked for them.
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

// How NCCL reduces what the header asks for among `size` ranks. None where it cannot, or would round what the core does
// not: other types than it has, averages and factors of integers, factors that the tensors' type does not have.
std::optional<NcclReduction> nccl_reduction_for(const Header& header, int size);

// Whether NCCL carries out what the header asks for.
bool nccl_moves(const Header& header, int size);

}  // namespace ring
