// What must hold when something below the core fails, each arranged on purpose.
#pragma once

namespace ring::test {

// Throws std::logic_error for what does not hold.
void check_faults();

}  // namespace ring::test
