// Ring memory: blocks that are kept, calls that must not wait for each other, and objects that must not be kept for
// ever.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "fakes/intercepted.hpp"
#include "faults/faults.hpp"
#include "ring/base/errors.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

// A condition that the test sets.
class Told : public Arena::Condition {
   public:
    explicit Told(const bool& told) : told_(told) {}
    bool holds(RingMemory&) noexcept override { return told_; }

   private:
    const bool& told_;
};

void a_block_is_kept() {
    const auto ring_memory = RingMemory::create(0, 1, kArena);
    bool first = false, second = false;
    {
        const Region region(ring_memory, 5 * kPage);
        ring_memory->keep(ring_memory->offset_of(region.data(), 1) + kPage, std::make_shared<Told>(first));
        ring_memory->keep(ring_memory->offset_of(region.data(), 1), std::make_shared<Told>(second));
    }
    const auto is_free = [&] {
        ring_memory->release(ring_memory->allocate(1));
        return ring_memory->allocated() == 0;
    };
    expect(!is_free(), "a block that is kept was freed");
    first = true;
    expect(!is_free(), "a block that is kept twice was freed when one condition held");
    second = true;
    expect(is_free(), "a block was kept although its conditions hold");
}

// The kernel takes long to reserve pages; ranks that check whether others are alive do not wait for it.
void pages_are_reserved_beside_other_calls() {
    const auto ring_memory = RingMemory::create(0, 2, kArena);
    const std::uint64_t block = ring_memory->allocate(kPage);
    std::thread other;
    std::atomic<bool> done{false};
    bool in_time = false;
    {
        const DuringFallocate look([&] {
            other = std::thread([&] {
                ring_memory->release(block);
                done = ring_memory->allocated() > 0;
            });
            const auto elapsed = stopwatch();
            while (!done && elapsed() < 3.0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            in_time = done;
        });
        ring_memory->release(ring_memory->allocate(10 * kPage));
    }
    other.join();
    expect(in_time, "other calls waited until the kernel had reserved pages");
}

// A tensor that is not reused, because a stopped rank may write to it, does not keep the ring memory alive.
void what_is_kept_does_not_keep_the_memory() {
    std::weak_ptr<RingMemory> gone[2];
    {
        const auto first = RingMemory::create(0, 2, kArena);
        const std::shared_ptr<RingMemory> memories[] = {first, first->share(1)};
        for (int rank : {0, 1}) gone[rank] = memories[rank];
        const auto reservation = std::make_unique<BlockReservation>(first, std::vector<int>{0, 1}, Room{2, 64, 64, 0});
        HostGroup::publish(*first, {0, 1}, reservation->offset(), 1);
        HostGroup stopped(memories[1], reservation->offset(), {{0, 1}, {0, 1}, 1, 1, 0}, nullptr);
        const HostGroup::Moving moving(stopped);
        HostGroup group(first, reservation->offset(), {{0, 1}, {0, 1}, 0, 1, 0}, nullptr);
        const Region tensor(first, kPage);
        first->keep(first->offset_of(tensor.data(), kPage), group.quiet());
    }
    expect(gone[0].expired() && gone[1].expired(), "ring memory outlives all that use it");
}

void no_rank_has_two_arenas() {
    const auto ring_memory = RingMemory::create(0, 2, kArena);
    bool refused = false;
    try {
        ring_memory->share(0);
    } catch (const Error&) {
        refused = true;
    }
    expect(refused, "two objects allocate from one arena");
}

void nothing_is_kept_where_memory_is_short() {
    expect(reserve_for(4 * kReserve) == kReserve, "a rank keeps no reserve on a machine that has plenty");
    expect(reserve_for(4 * kReserve - 1) == 0 && reserve_for(0) == 0, "a rank keeps what others need");
}

// Tensors without elements lie nowhere, also in a fused allreduce.
void some_tensors_of_a_list_are_empty() {
    for (const bool as_hosts : {false, true})
        for (const std::size_t most : {std::size_t{0}, std::size_t{8}, std::size_t{100'000}})
            as_ranks("some tensors of a list are empty", 2, as_hosts, [&](Place place) {
                const auto ring = place.open();
                const Region region(place.ring_memory, (most + 1) * sizeof(float));
                std::vector<float> beside(most / 8, 1.0f);
                auto* const within = static_cast<float*>(region.data());
                std::fill_n(within, most, 1.0f);
                Request request;
                request.kind = OpKind::Allreduce;
                request.dtype = DType::Float32;
                const auto add = [&](float* data, std::size_t count) {
                    request.pieces.push_back(
                        {reinterpret_cast<const std::byte*>(data), reinterpret_cast<std::byte*>(data), count});
                };
                add(nullptr, 0);
                add(within, most);
                add(nullptr, 0);
                add(beside.data(), beside.size());
                add(nullptr, 0);
                request.shape = {static_cast<std::int64_t>(most + beside.size())};
                carry_out(*ring, request, false);
                expect(std::count(within, within + most, 2.0f) == static_cast<std::ptrdiff_t>(most) &&
                           std::count(beside.begin(), beside.end(), 2.0f) == static_cast<std::ptrdiff_t>(beside.size()),
                       "a list with empty tensors has wrong sums");
            });
}

}  // namespace

void check_memory() {
    some_tensors_of_a_list_are_empty();
    a_block_is_kept();
    pages_are_reserved_beside_other_calls();
    what_is_kept_does_not_keep_the_memory();
    no_rank_has_two_arenas();
    nothing_is_kept_where_memory_is_short();
}

}  // namespace ring::test
