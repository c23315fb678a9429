// Whether the ranks call the same operation, and the table of who called what where they do not.
#pragma once

#include <string>
#include <vector>

#include "ring/group/header.hpp"

namespace ring {

// One line of a mismatch table: "allreduce sum 'grad' float32 [3, 4]"
std::string describe_fully(const Header& header);

// Empty when the ranks agree; else what the rank at index `own` expected, what another one sent and what to do, with a
// table of what each called. A joined rank agrees with any allreduce. `ranks` are the global ranks of the headers.
std::string find_mismatch(const std::vector<Header>& headers, const std::vector<int>& ranks, int own = 0);

}  // namespace ring
