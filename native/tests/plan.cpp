#include "plan.hpp"

#include <algorithm>
#include <numeric>

namespace ring::test {

Plan make_plan(std::uint64_t seed, std::uint64_t generation, int ranks) {
    std::seed_seq sequence{seed, generation};
    std::mt19937_64 random(sequence);
    const auto below = [&](std::uint64_t n) { return random() % n; };

    Plan plan;
    std::vector<int> everybody(static_cast<std::size_t>(ranks));
    std::iota(everybody.begin(), everybody.end(), 0);
    plan.groups.push_back(everybody);
    for (std::uint64_t more = below(4); more > 0; --more) {
        std::vector<int> members = everybody;
        std::shuffle(members.begin(), members.end(), random);
        members.resize(1 + below(static_cast<std::uint64_t>(ranks)));
        plan.groups.push_back(members);
    }

    // Empty, within the mailbox, a few segments, many cache lines in each chunk.
    constexpr std::uint64_t sizes[] = {0, 1, 700, 4096, 5003, 70'001, 200'003};
    constexpr OpKind kinds[] = {OpKind::Allreduce, OpKind::Allreduce, OpKind::ReduceScatter, OpKind::Allgather,
                                OpKind::Broadcast, OpKind::Alltoall,  OpKind::Barrier};
    for (std::uint64_t i = 0; i < 40; ++i) {
        Action action{};
        action.group = below(plan.groups.size());
        action.kind = kinds[below(std::size(kinds))];
        action.count = sizes[below(std::size(sizes))];
        action.root = static_cast<int>(below(plan.groups[action.group].size()));
        action.queued = below(2) == 0;
        action.named = action.queued && below(2) == 0;
        plan.actions.push_back(action);
    }

    plan.trouble.kind = static_cast<Trouble::Kind>(below(8) < 4 ? 0 : 1 + below(4));
    plan.trouble.rank = static_cast<int>(below(static_cast<std::uint64_t>(ranks)));
    plan.trouble.at = below(plan.actions.size());
    return plan;
}

}  // namespace ring::test
