// A rank that runs out of memory at any moment: its process does not end, and all ranks that wait for it learn of it.
#include <atomic>
#include <optional>
#include <string>

#include "fakes/fake_mpi.hpp"
#include "fakes/intercepted.hpp"
#include "faults/faults.hpp"
#include "ring/communicator/member_group.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

struct Interrupted {};

// Longer than a string holds without an allocation.
const std::string kReason(500, 'x');

// While an operation fails, all allocations fail: from the first one on, then from the second on, and so on.
template <class Try>
void at_every_allocation(Try&& attempt) {
    bool failed = true;
    for (long after = 0; failed; ++after) {
        failed = attempt(after);
        expect(after < 1000, "an operation that fails never ends to allocate");
    }
}

void an_operation_fails(bool as_hosts, bool aborted) {
    std::uint64_t generation = 0;
    at_every_allocation([&](long after) {
        std::atomic<bool> failed{false}, over{false};
        ++generation;
        as_ranks("an operation fails without memory", 2, as_hosts, [&](const Place& place) {
            const auto ring = place.open(generation);
            if (place.rank == 1) {
                wait_for([&] { return over.load(); }, "the other rank has failed");
                const auto barriers = [&] {  // what it had begun may complete here
                    for (;;) carry_out(*ring, {}, false);
                };
                expect(fails<Aborted>(barriers), "a rank does not learn that another one has no memory");
                return;
            }
            std::optional<NoMemory> none;
            bool raised = false;
            try {
                carry_out(*ring, {}, false, kTimeout, [&] {
                    if (aborted) ring->abort(kReason);
                    if (!none) none.emplace(after);
                    if (!aborted) throw Interrupted{};
                });
            } catch (...) {
                raised = true;
            }
            failed = NoMemory::has_failed();
            none.reset();
            over = true;
            expect(raised && ring->aborted(), "an operation without memory did not fail");
        });
        return failed.load();
    });
}

// A stopped rank may still write to the tensor of a failed operation, so the tensor is kept, also when memory is short.
void a_tensor_is_kept() {
    const auto first = RingMemory::create(0, 2, kArena);
    const auto second = first->share(1);
    const std::vector<int> both{0, 1};
    auto reservation = std::make_unique<BlockReservation>(first, both, Room{2, kPage, kPage, 0});
    HostGroup::publish(*first, both, reservation->offset(), 1);
    HostGroup stopped(second, reservation->offset(), {both, both, 1, 1, 0}, nullptr);
    HostGroup group(first, reservation->offset(), {both, both, 0, 1, 0}, nullptr);
    reservation.reset();
    std::optional<Region> tensor(std::in_place, first, kPage);
    const std::size_t before = first->allocated();
    std::optional<HostGroup::Moving> moving(std::in_place, stopped);
    bool quiet = false;
    {
        const NoMemory none;
        group.abort(kReason);
        quiet = group.wait_quiet();
        first->keep(first->offset_of(tensor->data(), kPage), group.quiet());
        tensor.reset();
    }
    expect(!quiet, "a rank that is stopped while it moves data is not quiet");
    first->release(first->allocate(1));
    expect(first->allocated() == before, "a tensor that another rank may write to was freed");
    moving.reset();
    first->release(first->allocate(1));
    expect(first->allocated() == before - kPage, "a tensor that nobody writes to was not freed");
}

// The memory reserved for a group is released when its member gives it up, or cannot make it.
void a_group_is_not_made() {
    as_ranks("a group is not made without memory", 1, false, [](const Place& place) {
        std::uint64_t generation = 0;
        at_every_allocation([&](long after) {
            const auto ring = place.open(++generation);  // its progress thread has not started yet
            const auto allocated = [&] {
                place.ring_memory->release(place.ring_memory->allocate(1));
                return place.ring_memory->allocated();
            };
            const std::size_t before = allocated();
            try {
                const NoMemory none(after);
                const MemberGroup offer(ring, {0});
            } catch (const std::bad_alloc&) {
            }
            expect(allocated() == before, "ring memory of a group that was not made is lost");
            return NoMemory::has_failed();
        });
    });
}

// A small sum that fails before its header is posted leaves its communicator as it was.
void a_small_sum_fails() {
    as_ranks("a small sum fails without memory", 1, false, [](const Place& place) {
        const auto ring = place.open(1);
        float value = 1;
        const Piece piece{reinterpret_cast<std::byte*>(&value), reinterpret_cast<std::byte*>(&value), 1};
        SmallAllreduce call;
        call.pieces = &piece;
        call.count = 1;
        call.dtype = DType::Float32;
        call.name = kReason;
        const auto sum = [&] { return ring->allreduce_small(call, kTimeout, nullptr, [] { return 0u; }); };
        at_every_allocation([&](long after) {
            try {
                const NoMemory none(after);
                sum();
            } catch (const std::bad_alloc&) {
            }
            const bool failed = NoMemory::has_failed();
            expect(sum(), "a small sum that has failed keeps others from beginning");
            return failed;
        });
    });
}

// When a communicator is dropped with an operation under way, the waiting ranks learn of it: those of its host at once,
// those of other hosts when there is memory for a message.
void a_communicator_is_dropped(bool as_hosts) {
    std::uint64_t generation = 0;
    at_every_allocation([&](long after) {
        std::atomic<bool> failed{false};
        ++generation;
        as_ranks("a communicator is dropped without memory", 2, as_hosts, [&](const Place& place) {
            if (place.rank == 1) {
                const auto barriers = [&] {  // what it had begun may complete here
                    for (const auto ring = place.open(generation);;) carry_out(*ring, {}, false);
                };
                expect(fails<Aborted>(barriers), "a rank does not learn that another one has dropped a communicator");
                return;
            }
            auto ring = place.open(generation);
            const auto barrier = ring->start({}, kTimeout);
            const auto later = ring->start({}, kTimeout);
            {
                const NoMemory none(after, as_hosts ? 10 : -1);  // notices have 100 ms
                ring.reset();
                failed = NoMemory::has_failed();
            }
            expect(later->done(), "nobody learns that an operation was dropped");
        });
        return failed.load();
    });
}

void a_host_leaves() {
    std::uint64_t generation = 0;
    at_every_allocation([&](long after) {
        std::atomic<bool> failed{false};
        ++generation;
        as_ranks("a host leaves without memory", 2, true, [&](const Place& place) {
            const auto ring = place.open(generation);
            if (place.rank == 1) {
                expect(fails<Aborted>([&] { carry_out(*ring, {}, false); }),
                       "a rank does not learn that another host has left");
                return;
            }
            const NoMemory none(after);
            ring->close(nullptr);
            failed = NoMemory::has_failed();
        });
        return failed.load();
    });
}

// Memory that MPI may still write to is kept when its receive is cancelled.
void a_receive_is_cancelled() {
    const auto link = make_mpi_link({nullptr, 0, 0, sizeof(int), -2, -1, 32767});
    auto memory = std::make_shared<std::vector<char>>(1000);
    const std::weak_ptr<std::vector<char>> kept = memory;
    Link::Transfer transfer = link->receive(0, 1, memory->data(), memory->size());
    fake_mpi::match();
    {
        const NoMemory none;
        link->cancel(transfer, std::move(memory));
    }
    expect(transfer == 0 && !kept.expired(), "memory must stay while MPI may write to it");
    fake_mpi::deliver();
    link->drain();
    expect(kept.expired(), "memory must go when MPI has written to it");
}

// Destructors release ring memory.
void a_region_goes() {
    const auto ring_memory = RingMemory::create(0, 1, kArena);
    std::optional<Region> first(std::in_place, ring_memory, kPage), second(std::in_place, ring_memory, 3 * kPage);
    {
        const NoMemory none;
        first.reset();
        second.reset();
    }
    expect(ring_memory->allocated() == 0, "ring memory was not released");
}

}  // namespace

void check_out_of_memory() {
    for (const bool as_hosts : {false, true}) {
        for (const bool aborted : {false, true}) an_operation_fails(as_hosts, aborted);
        a_communicator_is_dropped(as_hosts);
    }
    a_tensor_is_kept();
    a_group_is_not_made();
    a_small_sum_fails();
    a_host_leaves();
    a_receive_is_cancelled();
    a_region_goes();
}

}  // namespace ring::test
