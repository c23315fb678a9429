// Checks of what Python passes as plain numbers.
#pragma once

#include <string>

#include "ring/base/errors.hpp"
#include "ring/base/types.hpp"

// The value of an enum whose values are 0 to `values` - 1. Throws InvalidArgument, which names the argument.
template <class Enum>
Enum enum_argument(const char* name, int number, int values) {
    if (number < 0 || number >= values)
        throw ring::InvalidArgument(std::string(name) + " must be between 0 and " + std::to_string(values - 1) +
                                    ", got " + std::to_string(number));
    return static_cast<Enum>(number);
}

inline ring::DType dtype_argument(int number) { return enum_argument<ring::DType>("dtype", number, ring::kDTypes); }
