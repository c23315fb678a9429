// Which operations, of those that all ranks have posted by name, are carried out as one (tensor fusion; Sergeev and
// Del Balso 2018).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ring/group/names.hpp"

namespace ring {

// The operations to carry out, in order: each a list of indices into `ready`, fused where there are several. A pure
// function of what all ranks know, so that all of them fuse alike.
//
// Allreduces of one dtype, reduction and scale share an operation up to `threshold` bytes. Alone are: every other kind;
// what the ranks disagree on, so that it fails alone; Adasum, which combines each tensor by its own direction; and what
// is large and lies in ring memory on all ranks, where nothing has to be copied.
std::vector<std::vector<std::size_t>> plan_fusion(const std::vector<Ready>& ready, const std::vector<int>& ranks,
                                                  std::uint64_t threshold);

}  // namespace ring
