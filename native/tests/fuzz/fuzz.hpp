// Invalid bytes at every place where one process reads data of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace ring::test {

using Dice = std::mt19937_64;

// Each repeats until `seconds` are over, and throws std::logic_error when a check fails. A damaged message may cause an
// error, but no hang and no fault that a sanitizer reports.
void fuzz_values(Dice& dice, double seconds);
void fuzz_link(Dice& dice, double seconds);
void fuzz_ring_memory(Dice& dice, double seconds);

// Overwrites, flips or clears one of the bytes.
void damage_one(Dice& dice, std::byte* data, std::size_t bytes);

}  // namespace ring::test
