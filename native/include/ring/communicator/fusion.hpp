// Which of the operations that all ranks have posted by name are fused into one (tensor fusion; Sergeev and Del Balso
// 2018).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ring/group/names.hpp"

namespace ring {

// The operations to carry out, in order: each a list of indices into `ready`, fused where there are several. A pure
// function of what all ranks know, so that all of them fuse in the same way.
//
// Allreduces of one dtype, reduction and scale share an operation up to `threshold` bytes. Not fused are other kinds;
// operations that the ranks disagree on, so that only these fail; Adasum, where each tensor has its own direction; and
// large tensors that lie in ring memory on all ranks, which need no copy.
std::vector<std::vector<std::size_t>> plan_fusion(const std::vector<Ready>& ready, const std::vector<int>& ranks,
                                                  std::uint64_t threshold);

}  // namespace ring
