// How much memory can be reserved before the out-of-memory killer wakes instead of an allocation failing.
#pragma once

#include <cstddef>
#include <string>

namespace ring {

// Bytes that the machine and the limits of this process's control groups have left.
std::size_t memory_left();

// Bytes that the control group of that path below `root`, and all groups it is in, have left; SIZE_MAX where none has
// a limit. What files are cached in is left: the kernel drops it before it kills.
std::size_t control_group_left(const std::string& root, std::string group);

}  // namespace ring
