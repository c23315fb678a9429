// How much memory can be reserved before the out-of-memory killer acts, which is before an allocation fails.
#pragma once

#include <cstddef>
#include <string>

namespace ring {

// Bytes that the machine and the limits of this process's control groups have left.
std::size_t memory_left();

// Bytes that control group `group` below `root`, and all its parents, have left; SIZE_MAX where none has a limit. The
// page cache counts as left: the kernel drops it before it kills.
std::size_t control_group_left(const std::string& root, std::string group);

}  // namespace ring
