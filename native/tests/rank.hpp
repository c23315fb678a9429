// One rank of the random test: carries out plans and checks every result.
#pragma once

#include <memory>
#include <random>

#include "fakes/fake_device.hpp"
#include "plan.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring::test {

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
