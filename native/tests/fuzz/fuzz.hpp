// Bytes that no rank would write, at every place where one process reads what another has written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace ring::test {

using Dice = std::mt19937_64;

// Each takes turns until `seconds` are over, and throws std::logic_error for what does not hold. What a damaged message
// may lead to is an error; what it may not is for the sanitizers to see, and to hang.
void fuzz_values(Dice& dice, double seconds);
void fuzz_link(Dice& dice, double seconds);
void fuzz_ring_memory(Dice& dice, double seconds);

// Overwrites, flips or clears one of the bytes.
void damage_one(Dice& dice, std::byte* data, std::size_t bytes);

}  // namespace ring::test
