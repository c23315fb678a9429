#include "rank.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "made_group.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

// Elements; few, because the kernels of the fake NCCL process one after the other.
constexpr std::uint64_t kMostOnDevice = 5003;

struct Interrupted {};

// Ordinary memory or ring memory, by the rank's choice.
class Tensor {
   public:
    Tensor(const std::shared_ptr<RingMemory>& ring_memory, std::uint64_t count, bool in_ring) {
        if (in_ring) {
            region_.emplace(ring_memory, count * sizeof(float));
        } else {
            ordinary_.resize(count);
        }
    }
    float* data() { return region_ ? static_cast<float*>(region_->data()) : ordinary_.data(); }

   private:
    std::optional<Region> region_;
    std::vector<float> ordinary_;
};

}  // namespace

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

struct Rank::Open {
    const Action* action;
    std::size_t index;
    std::vector<int> members;
    int own;  // index in the group
    bool on_device;
    std::uint64_t count;     // as that of the action
    std::uint64_t elements;  // of this rank's tensor
    std::unique_ptr<Tensor> input, output;
    std::vector<float> values;  // what the device writes to the input
    bool by_host;               // on a device, and NCCL lacks it: twice the greatest
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<Work> work;
    Request request;
};

Rank::Rank(Seat seat, std::uint64_t seed)
    : seat_(std::move(seat)), random_(seed * 1000 + static_cast<std::uint64_t>(seat_.rank)) {}

Rank::~Rank() = default;

void Rank::run(const Plan& plan, std::uint64_t generation) {
    Communicator::Setup setup;
    setup.ring_memory = seat_.ring_memory;
    setup.ranks = plan.groups.front();
    setup.index = seat_.rank;
    setup.generation = generation;
    setup.options = seat_.options;
    if (seat_.device != nullptr) setup.devices = seat_.device->devices();
    for (int rank : setup.ranks)
        if (seat_.hosts[static_cast<std::size_t>(rank)] == seat_.hosts[static_cast<std::size_t>(seat_.rank)])
            setup.local.push_back(rank);
    if (seat_.link) {
        setup.link = seat_.link;
        setup.host_of = seat_.hosts;
        setup.addresses = setup.ranks;
    }
    std::vector<Open> open;
    try {
        groups_.push_back(Communicator::open(std::move(setup), kTimeout, nullptr));
        for (std::size_t i = 1; i < plan.groups.size(); ++i)
            groups_.push_back(make_group(groups_.front(), plan.groups[i], kTimeout));
        for (std::size_t i = 0; i < plan.actions.size(); ++i) {
            if (plan.trouble.kind != Trouble::Kind::None && plan.trouble.at == i) {
                if (plan.trouble.rank == seat_.rank) {
                    cause(plan.trouble);
                } else if (plan.trouble.kind == Trouble::Kind::Interrupt) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(120));  // let the other one wait
                }
            }
            act(plan, i, open);
        }
        start_held(open);
        settle(open, 0, true);
        groups_.front()->close(nullptr);
    } catch (const Aborted& aborted) {
        if (plan.trouble.kind == Trouble::Kind::None)
            throw std::logic_error(std::string("aborted without a cause: ") + aborted.what());
    } catch (const Mismatch& mismatch) {
        // A rank that leaves waits for what it began, which the others may not get to: they all stand still.
        if (plan.trouble.kind != Trouble::Kind::Mismatch && plan.trouble.kind != Trouble::Kind::Leave)
            throw std::logic_error(std::string("a mismatch without a cause: ") + mismatch.what());
        groups_.front()->abort("rank " + std::to_string(seat_.rank) + " saw a mismatch");
    } catch (const Timeout&) {
        if (plan.trouble.kind != Trouble::Kind::Mismatch) throw;
    } catch (const Interrupted&) {
    }
    // Operations may be under way: first destroy the communicators, which ends them, then the tensors.
    groups_.clear();
    for (Open& one : open) one.communicator.reset();
    for (Open& one : held_) one.communicator.reset();
    if (seat_.device != nullptr) seat_.device->drain();
    held_.clear();
}

void Rank::cause(const Trouble& trouble) {
    Request barrier;
    Communicator& everybody = *groups_.front();
    switch (trouble.kind) {
        case Trouble::Kind::None:
            return;
        case Trouble::Kind::Abort:
            everybody.abort("rank " + std::to_string(seat_.rank) + " was told to");
            return;
        case Trouble::Kind::Interrupt:
            everybody.run(std::move(barrier), kTimeout, [] { throw Interrupted{}; })->get();
            break;
        case Trouble::Kind::Mismatch:
            barrier.name = "the others call something else or nothing here";
            everybody.run(std::move(barrier), 1.0, nullptr)->get();
            break;
        case Trouble::Kind::Leave:
            break;
    }
    // Also if the others happened to call a barrier too: from now on this rank would be out of step.
    everybody.close(nullptr);
    throw Interrupted{};
}

void Rank::act(const Plan& plan, std::size_t index, std::vector<Open>& open) {
    const Action& action = plan.actions[index];
    const std::shared_ptr<Communicator>& group = groups_[action.group];
    if (!group) return;
    if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));

    const auto size = static_cast<std::uint64_t>(group->size());
    const bool by_rank = action.kind == OpKind::ReduceScatter || action.kind == OpKind::Alltoall;
    const bool on_device = seat_.device != nullptr && action.kind != OpKind::Barrier && index % 5 != 0;
    Open one{&action, index, group->ranks(), group->index(), on_device, action.count, 0, nullptr, nullptr,
             {},      false, group,          nullptr,        {}};
    if (on_device) one.count = std::min(one.count, kMostOnDevice);
    // In an allgather each rank has another count, and some have none.
    const std::uint64_t own = action.kind == OpKind::Allgather
                                  ? one.count * static_cast<std::uint64_t>(group->index()) / size
                                  : one.count * (by_rank ? size : 1);
    one.elements = own;
    one.input = std::make_unique<Tensor>(seat_.ring_memory, own, random_() % 2 == 0);
    one.output = std::make_unique<Tensor>(seat_.ring_memory, own, random_() % 2 == 0);
    one.values.resize(own);
    for (std::uint64_t i = 0; i < own; ++i) one.values[i] = value(seat_.rank, index, i);
    if (on_device) {
        seat_.device->write(one.input->data(), one.values.data(), own * sizeof(float));
    } else {
        std::copy(one.values.begin(), one.values.end(), one.input->data());
    }

    Request request;
    request.kind = action.kind;
    request.dtype = DType::Float32;
    request.root = action.kind == OpKind::Broadcast ? action.root : -1;
    request.shape = {static_cast<std::int64_t>(own)};
    if (action.kind == OpKind::Alltoall) request.splits.assign(size, static_cast<std::int64_t>(one.count));
    if (action.kind != OpKind::Barrier)
        request.pieces.push_back({reinterpret_cast<const std::byte*>(one.input->data()),
                                  reinterpret_cast<std::byte*>(one.output->data()), own});
    if (on_device) seat_.device->put(request);
    if (on_device && action.kind == OpKind::Allreduce && index % 3 == 0) {
        one.by_host = true;
        request.op = ReduceOp::Max;
        request.prescale = 2.0;
    }
    ++operations_;
    if (action.named) {
        request.name = "action " + std::to_string(index);
        one.request = std::move(request);
        held_.push_back(std::move(one));
        if (random_() % 4 == 0) start_held(open);
    } else if (action.queued) {
        open.push_back(std::move(one));
        open.back().work = group->start(std::move(request), kTimeout);
        if (random_() % 4 == 0) settle(open, random_() % open.size(), false);
    } else {
        open.push_back(std::move(one));  // its tensors are kept should it fail
        open.back().work = group->run(std::move(request), kTimeout, nullptr);
        finish(open.back());
        open.pop_back();
    }
}

void Rank::start_held(std::vector<Open>& open) {
    std::shuffle(held_.begin(), held_.end(), random_);
    for (Open& one : held_) {
        one.work = one.communicator->start(std::move(one.request), kTimeout);
        open.push_back(std::move(one));
    }
    held_.clear();
}

// Named operations may wait for names that other ranks have not started yet, so they are settled when all are started.
void Rank::settle(std::vector<Open>& open, std::size_t leave, bool named) {
    for (auto one = open.begin(); one != open.end() && open.size() > leave;) {
        if (named || !one->action->named) {
            finish(*one);
            one = open.erase(one);
        } else {
            ++one;
        }
    }
}

void Rank::finish(Open& open) {
    if (open.on_device) {
        seat_.device->finish(*open.communicator, *open.work);
    } else {
        open.communicator->wait(*open.work, 0, nullptr);
        open.work->get();
    }
    const Action& action = *open.action;
    const std::string what = std::string(to_string(action.kind)) + " of " + std::to_string(open.count) + ", action " +
                             std::to_string(open.index);
    const float* got = open.output->data();
    const Result& result = open.work->result;
    const auto* produced =
        reinterpret_cast<const float*>(result.on_device ? result.on_device->data() : result.data.get());
    const auto size = open.members.size();
    const auto brings = [&](std::size_t member, std::uint64_t i) { return value(open.members[member], open.index, i); };
    const auto sum = [&](std::uint64_t i) {
        float total = 0;
        for (std::size_t member = 0; member < size; ++member) total += brings(member, i);
        return total;
    };
    const auto twice_the_greatest = [&](std::uint64_t i) {
        float greatest = 0;
        for (std::size_t member = 0; member < size; ++member) greatest = std::max(greatest, 2 * brings(member, i));
        return greatest;
    };
    std::uint64_t at = 0;
    switch (action.kind) {
        case OpKind::Allreduce:
            for (std::uint64_t i = 0; i < open.count; ++i)
                expect(got[i] == (open.by_host ? twice_the_greatest(i) : sum(i)), what);
            break;
        case OpKind::ReduceScatter:
            for (std::uint64_t i = 0; i < open.count; ++i)
                expect(got[i] == sum(i + open.count * static_cast<std::uint64_t>(open.own)), what);
            break;
        case OpKind::Broadcast:
            for (std::uint64_t i = 0; i < open.count; ++i)
                expect(got[i] == brings(static_cast<std::size_t>(action.root), i), what);
            break;
        case OpKind::Allgather:
            for (std::size_t member = 0; member < size; ++member)
                for (std::uint64_t i = 0; i < open.count * member / size; ++i)
                    expect(produced[at++] == brings(member, i), what);
            break;
        case OpKind::Alltoall:
            for (std::size_t member = 0; member < size; ++member)
                for (std::uint64_t i = 0; i < open.count; ++i)
                    expect(produced[at++] == brings(member, i + open.count * static_cast<std::uint64_t>(open.own)),
                           what);
            break;
        case OpKind::Barrier:
        case OpKind::Join:
        case OpKind::Send:
        case OpKind::Receive:
        case OpKind::Commit:
            break;
    }
}

}  // namespace ring::test
