// The line of the program that has called an operation: the innermost one outside of this package and of PyTorch.
#pragma once

#include <cstdint>
#include <memory>

#include "ring/communicator/communicator.hpp"

// Its number in the log of the communicator's operations; 0 where there is none. Needs the GIL.
std::uint32_t call_site(const ring::Communicator& communicator);
