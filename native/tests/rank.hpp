// The random test: the actions of all ranks in one generation, and a rank that carries them out and checks results.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "fakes/fake_device.hpp"
#include "ring/communicator/communicator.hpp"

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

struct Seat {
    std::shared_ptr<RingMemory> ring_memory;
    std::shared_ptr<Link> link;  // null when all ranks share a host
    std::vector<int> hosts;      // by rank
    int rank;
    Options options;
    const FakeDevice* device = nullptr;  // null where all tensors are in host memory
};

class Rank {
   public:
    Rank(Seat seat, std::uint64_t seed);
    ~Rank();
    // Opens the generation, carries the plan out until its end or its trouble, and leaves. Throws std::logic_error for
    // a wrong result, and for an error that the plan does not explain.
    void run(const Plan& plan, std::uint64_t generation);
    std::size_t operations() const { return operations_; }

   private:
    struct Open;  // a queued operation whose result is not checked yet

    void act(const Plan& plan, std::size_t index, std::vector<Open>& open);
    void start_held(std::vector<Open>& open);
    void cause(const Trouble& trouble);
    void finish(Open& open);
    void settle(std::vector<Open>& open, std::size_t leave, bool named);

    Seat seat_;
    std::mt19937_64 random_;
    std::vector<std::shared_ptr<Communicator>> groups_;
    std::vector<Open> held_;  // named operations, to be started in an order of this rank's own
    std::size_t operations_ = 0;
};

}  // namespace ring::test
