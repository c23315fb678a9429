// The actions of all ranks in one generation: drawn from a seed, so that every rank has the same plan.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "ring/base/dtypes_and_ops.hpp"

namespace ring::test {

struct Action {
    std::size_t group;
    OpKind kind;
    std::uint64_t count;  // elements of each rank; per rank of the group for reducescatter and alltoall
    int root;             // index in the group
    bool queued;
    bool named;  // queued ones: in another order on each rank
};

// How a generation ends before the end of its plan.
struct Trouble {
    enum class Kind { None, Abort, Interrupt, Leave, Mismatch };
    Kind kind = Kind::None;
    int rank = 0;
    std::size_t at = 0;  // index of the action
};

struct Plan {
    std::vector<std::vector<int>> groups;  // group 0 is everybody
    std::vector<Action> actions;
    Trouble trouble;
};

Plan make_plan(std::uint64_t seed, std::uint64_t generation, int ranks);

// Element `i` of the input of `rank` to action `action`. Sums over a few ranks are exact in float32.
inline float value(int rank, std::size_t action, std::uint64_t i) {
    return static_cast<float>((static_cast<std::uint64_t>(rank) * 5 + action * 3 + i) % 17);
}

}  // namespace ring::test
