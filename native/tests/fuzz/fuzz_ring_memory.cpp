// A rank of the same host writes invalid data into ring memory: damaged headers, and damaged messages.
#include <atomic>
#include <cstring>
#include <deque>

#include "fuzz/fuzz.hpp"
#include "messages/envelope.hpp"
#include "ring/base/errors.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

constexpr double kPatience = 0.3;  // seconds
constexpr std::uint64_t kBeyond = kNowhere / 2;

// Damages one field of a header that agreed with the other rank's.
void damage_field(Dice& dice, Header& header) {
    const std::uint64_t places[] = {kBeyond, kNowhere - 1, kNowhere - 100, std::uint64_t{1} << 40};
    const auto any = static_cast<std::uint8_t>(dice());
    switch (dice() % 16) {
        case 0:
            header.kind = static_cast<OpKind>(any);
            break;
        case 1:
            header.dtype = static_cast<DType>(any);
            break;
        case 2:
            header.op = static_cast<ReduceOp>(any);
            break;
        case 3:
            header.dims = any;
            break;
        case 4:
            header.is_inline ^= any;
            break;
        case 5:
            header.wire = static_cast<DType>(any);
            break;
        case 6:
            header.device = static_cast<Device>(any);
            break;
        case 7:
            header.root = static_cast<std::int32_t>(dice());
            break;
        case 8:
            header.tensors = static_cast<std::int32_t>(dice());
            break;
        case 9:
            header.count = dice() % 2 == 0 ? dice() % 1'000'000 : dice() | std::uint64_t{1} << 63;
            break;
        case 10:
            header.shape[dice() % kMaxDims] = static_cast<std::int64_t>(dice());
            break;
        case 11:
            std::memset(header.name, 'x', kNameBytes);
            break;
        case 12:
            header.joined_at = dice();
            break;
        case 13:
            header.layout = dice();
            break;
        // An input may be anywhere in ring memory, but an output there would overwrite data in use.
        case 14:
            header.input = dice() % 2 == 0 ? places[dice() % std::size(places)] : dice() % kArena / 64 * 64;
            break;
        default:
            header.output = places[dice() % std::size(places)];
    }
}

Envelope* post_envelope(Dice& dice, HostGroup& group, std::uint64_t count) {
    RingMemory& ring_memory = group.ring_memory();
    const std::uint64_t offset = ring_memory.allocate(sizeof(Envelope) + kWindowBytes);
    auto* const envelope = new (ring_memory.at(offset)) Envelope();
    envelope->from = 1;
    envelope->dtype = DType::Float32;
    envelope->count = count;
    if (dice() % 2 == 0) envelope->data = offset + sizeof(Envelope);
    switch (dice() % 8) {
        case 0:
            envelope->from = static_cast<std::int32_t>(dice());
            break;
        case 1:
            envelope->dtype = static_cast<DType>(dice());
            break;
        case 2:
            envelope->count = dice() % 2 == 0 ? dice() : count + dice() % 100;
            break;
        case 3:
            envelope->data = dice() % 2 == 0 ? dice() : kBeyond;
            break;
        case 4:
            envelope->filled.store(dice(), std::memory_order_seq_cst);
            break;
        case 5:
            envelope->next = dice() % 2 == 0 ? dice() : offset;  // a circle
            break;
        case 6:
            envelope->tag = static_cast<std::int32_t>(dice());
            break;
        default:
            break;
    }
    const std::uint64_t hung = dice() % 8 == 0 ? dice() : offset;
    group.envelopes(0).store(hung, std::memory_order_seq_cst);
    group.ring_bell_of(0);
    return envelope;
}

// An operation of the honest rank, which the other rank answers with headers of its own.
Request some_request(Dice& dice, std::vector<std::byte>& memory, const std::shared_ptr<RingMemory>& ring_memory,
                     std::optional<Region>& region) {
    constexpr OpKind kinds[] = {OpKind::Allreduce, OpKind::ReduceScatter, OpKind::Allgather,
                                OpKind::Broadcast, OpKind::Alltoall,      OpKind::Barrier};
    constexpr std::size_t counts[] = {2, 700, 20'000, 150'000};
    Request request;
    request.kind = kinds[dice() % std::size(kinds)];
    if (request.kind == OpKind::Barrier) return request;
    const std::size_t count = counts[dice() % std::size(counts)];
    request.dtype = DType::Float32;
    request.root = request.kind == OpKind::Broadcast ? static_cast<int>(dice() % 2) : -1;
    request.shape = {static_cast<std::int64_t>(count)};
    if (request.kind == OpKind::Alltoall) request.splits.assign(2, static_cast<std::int64_t>(count / 2));
    std::byte* data = nullptr;
    if (dice() % 2 == 0) {
        region.emplace(ring_memory, count * sizeof(float));
        data = static_cast<std::byte*>(region->data());
    } else {
        memory.resize(count * sizeof(float));
        data = memory.data();
    }
    const int pieces = request.kind == OpKind::Allreduce && dice() % 2 == 0 ? 2 : 1;
    for (int i = 0; i < pieces; ++i) {
        const std::size_t part = count / static_cast<std::size_t>(pieces);
        std::byte* const at = data + static_cast<std::size_t>(i) * part * sizeof(float);
        request.pieces.push_back({at, at, part});
    }
    if (pieces > 1) request.shape.clear();
    return request;
}

void honest(const Place& place, Dice dice, std::uint64_t generation) {
    // They outlive the communicator, because a message that has timed out may still move.
    std::deque<std::vector<std::byte>> memories;
    std::deque<std::optional<Region>> regions;
    std::deque<std::vector<float>> payloads;
    const auto ring = place.open(generation);
    for (int i = 0; i < 3; ++i) {
        std::vector<std::byte>& memory = memories.emplace_back();
        std::optional<Region>& region = regions.emplace_back();
        Request request = some_request(dice, memory, place.ring_memory, region);
        if (dice() % 3 == 0) {
            std::vector<float>& payload = payloads.emplace_back(dice() % 2 == 0 ? 100 : 100'000);
            const auto receive = ring->receive(1, 0, payload.data(), payload.size(), DType::Float32, kPatience, true);
            ring->wait(*receive, kPatience, nullptr);
            continue;
        }
        try {
            carry_out(*ring, std::move(request), dice() % 2 == 0, kPatience);
        } catch (const Mismatch&) {  // the group stays usable
        }
    }
}

// Arrives at every gate, with headers like those of the other rank, some of them damaged.
void hostile(const Place& place, Dice dice, std::uint64_t generation, const std::atomic<bool>& over) {
    RingMemory& ring_memory = *place.ring_memory;
    const RankSlot& leader = ring_memory.slot(0);
    while (leader.generation.load(std::memory_order_seq_cst) != generation && !over) std::this_thread::yield();
    if (over) return;
    HostGroup group(place.ring_memory, leader.generation_block.load(std::memory_order_seq_cst),
                    {{0, 1}, {0, 1}, 1, generation, 0, {}}, nullptr);
    std::uint64_t gate = 0, sequence = 0;
    for (std::vector<Envelope*> envelopes; !over;) {
        const bool is_called = group.is_called();
        for (Envelope* envelope : envelopes) {
            if (dice() % 4 == 0)
                envelope->filled.store(dice() % 2 == 0 ? dice() : dice() % 2 * 400, std::memory_order_seq_cst);
            if (dice() % 4 == 0) envelope->emptied.store(dice(), std::memory_order_seq_cst);
        }
        if (!is_called) {
            if (sequence > 0 && envelopes.size() < 3 && dice() % 64 == 0)
                envelopes.push_back(post_envelope(dice, group, dice() % 2 == 0 ? 100 : 100'000));
            std::this_thread::yield();
            continue;
        }
        const Header newest = std::max(group.header(0, 0), group.header(0, 1),
                                       [](const Header& a, const Header& b) { return a.sequence < b.sequence; });
        if (newest.sequence > sequence) {
            sequence = newest.sequence;
            Header header = newest;
            std::int64_t* const splits = group.splits(1, sequence);
            splits[0] = splits[1] = static_cast<std::int64_t>(header.count / 2);
            // The first header is intact, so that the generation begins.
            if (sequence > 1 && dice() % 2 == 0) damage_field(dice, header);
            if (sequence > 1 && dice() % 8 == 0) splits[dice() % 2] = static_cast<std::int64_t>(dice());
            group.post(header);
        }
        gate = group.arrive();
        static_cast<void>(gate);
    }
}

}  // namespace

void fuzz_ring_memory(Dice& dice, double seconds) {
    const auto elapsed = stopwatch();
    do {
        std::atomic<bool> over{false};
        const auto seed = dice();
        as_ranks("a rank that damages ring memory", 2, false, [&](Place place) {
            if (place.rank == 1) {
                hostile(place, Dice(seed), 1, over);
                return;
            }
            struct Over {
                std::atomic<bool>& flag;
                ~Over() { flag = true; }
            } const ends{over};
            try {
                honest(place, Dice(seed + 1), 1);
            } catch (const Error&) {
            }
        });
    } while (elapsed() < seconds);
}

}  // namespace ring::test
