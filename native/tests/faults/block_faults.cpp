// Ranks that are late for a group whose block is closed, freed or reused.
#include <cstring>
#include <vector>

#include "faults/faults.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

const Room kRoom{2, 64, 64, 0};
const std::vector<int> kLocal{0, 1};

HostGroup::Members member(int index, std::uint64_t generation) { return {kLocal, kLocal, index, generation, 0}; }

std::size_t allocated(const std::shared_ptr<RingMemory>& ring_memory) {
    ring_memory->release(ring_memory->allocate(1));  // frees blocks that no rank uses any more
    return ring_memory->allocated();
}

// A rank that is late for a generation gets an error, and does not touch the next generation, whose block is at the
// same offset.
void late_for_a_generation() {
    const auto first = RingMemory::create(0, 2, kArena);
    const auto second = first->share(1);
    const auto enter = [&](std::uint64_t block, std::uint64_t generation) {
        HostGroup(second, block, member(1, generation), nullptr);
    };
    auto reservation = std::make_unique<BlockReservation>(first, kLocal, kRoom);
    const std::uint64_t block = reservation->offset();
    HostGroup::publish(*first, kLocal, block, 7);
    reservation.reset();
    expect(allocated(first) == 0, "a block that nobody has entered is not freed when it is closed");
    expect(fails<Aborted>([&] { enter(block, 7); }), "a rank entered a block that was closed");

    reservation = std::make_unique<BlockReservation>(first, kLocal, kRoom);
    expect(reservation->offset() == block, "the next block lies elsewhere");
    HostGroup::publish(*first, kLocal, block, 8);
    expect(fails<Aborted>([&] { enter(block, 7); }), "a generation let a rank of another one in");
    enter(block, 8);
}

// The memory of a freed block is a tensor now, with the bytes of the block: the late rank writes nothing to it.
void late_for_a_block_that_is_a_tensor() {
    const auto first = RingMemory::create(0, 2, kArena);
    const auto second = first->share(1);
    auto reservation = std::make_unique<BlockReservation>(first, kLocal, kRoom);
    const std::uint64_t block = reservation->offset();
    HostGroup::publish(*first, kLocal, block, 7);
    const std::size_t bytes = BlockLayout(2, kRoom).bytes;
    const std::vector<std::byte> before(first->at<std::byte>(block), first->at<std::byte>(block) + bytes);
    reservation.reset();
    first->release(first->allocate(1));
    const Region tensor(first, bytes);
    expect(first->offset_of(tensor.data(), bytes) == block, "the tensor lies elsewhere");
    std::memcpy(tensor.data(), before.data(), bytes);
    expect(fails<Aborted>([&] { HostGroup(second, block, member(1, 7), nullptr); }),
           "a rank took a tensor for a block");
    expect(std::memcmp(tensor.data(), before.data(), bytes) == 0, "a rank that was late wrote to a tensor");
}

// A rank is about to enter and has not checked yet whether it may: the owner does not free the block meanwhile.
void freed_while_a_rank_enters() {
    const auto first = RingMemory::create(0, 2, kArena);
    const auto second = first->share(1);
    auto reservation = std::make_unique<BlockReservation>(first, kLocal, kRoom);
    for (const bool is_valid : {false, true}) {
        std::size_t during = 0;
        const std::uint64_t block = reservation->offset();
        const auto try_it = [&] {
            BlockReference(*second, block, kLocal, 1, [&] {
                reservation.reset();
                during = allocated(first);
                return is_valid;
            });
        };
        expect(fails<Aborted>(try_it) != is_valid, "a rank entered a block or not against what was said of it");
        expect(during != 0, "a block was freed under a rank that was about to enter it");
        // The first member never came, and cannot enter any more.
        expect(allocated(first) == 0, "a block was not freed when nobody entered it any more");
        reservation = std::make_unique<BlockReservation>(first, kLocal, kRoom);
    }
}

void slots_are_aligned() {
    for (int hosts = 1; hosts < 40; ++hosts)
        expect(inline_bytes({}, hosts) % kHeaderLine == 0, "a mailbox begins in the middle of a number");
}

}  // namespace

void check_blocks() {
    slots_are_aligned();
    late_for_a_generation();
    late_for_a_block_that_is_a_tensor();
    freed_while_a_rank_enters();
}

}  // namespace ring::test
