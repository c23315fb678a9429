// Checks that a header from another process can be one that a rank writes.
//
// Its fields later index tables and memory. Ranks of different versions, or a rank that writes where it should not,
// must end the generation with an error and not in a segmentation fault.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ring/group/header.hpp"

namespace ring {

// More bytes than any tensor has; sums of several smaller counts do not overflow.
constexpr std::uint64_t kNoTensor = std::uint64_t{1} << 50;

// What is wrong with it; empty where nothing is. `inline_bytes` is the most that travels in a mailbox.
std::string damage(const Header& header, std::size_t inline_bytes);
// Throws Error for the first that is damaged, and names its rank (`ranks` are those of the headers).
void check_headers(const std::vector<Header>& headers, const std::vector<int>& ranks, std::size_t inline_bytes);
// Whether the parts that an alltoall sends to `size` ranks make up `count` elements.
bool adds_up(const std::int64_t* splits, int size, std::uint64_t count);
// For data that a rank has posted or sent besides its header.
[[noreturn]] void throw_damaged(int rank, const std::string& what);

}  // namespace ring
