// The algorithms of tensors on devices, for the table of paths.
#pragma once

#include "ring/collectives/host/algorithm.hpp"

namespace ring {

MakeAlgorithm make_nccl, make_device_copy;

}  // namespace ring
