// Ranks as threads do random operations on random groups while some abort, leave, are interrupted or disagree; every
// result is checked. Made for the sanitizers, which see all ranks of one process over one mapping.
//
//   ring_tests [generations] [ranks] [hosts] [seed] [--past-cache] [--devices]
//   ring_tests --faults
//   ring_tests --fuzz [seconds] [seed]
//
// With --past-cache ranks write segments past the cache. With --devices most tensors are on devices of the fake driver
// and the fake NCCL. --faults instead runs tests of single faults, and --fuzz sends damaged bytes from other processes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "fakes/fake_device.hpp"
#include "faults/faults.hpp"
#include "fuzz/fuzz.hpp"
#include "rank.hpp"
#include "ring/group/membership.hpp"
#include "support.hpp"

namespace {

using namespace ring;
using namespace ring::test;

constexpr double kAgreement = 60.0;  // seconds
constexpr auto kStuck = std::chrono::seconds(120);

int argument(int count, char** values, int index, int otherwise) {
    return index < count ? std::atoi(values[index]) : otherwise;
}

bool has_flag(int count, char** values, const char* flag) {
    return std::any_of(values + 1, values + count, [&](const char* value) { return std::strcmp(value, flag) == 0; });
}

int faults() {
    try {
        check_links();
        check_tcp();
        check_notices();
        check_notice_kinds();
        check_memory();
        check_blocks();
        check_closing();
        check_out_of_memory();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::printf("faults\n");
    return 0;
}

int fuzz(int seconds, int seed) {
    Dice dice(static_cast<Dice::result_type>(seed));
    try {
        fuzz_values(dice, seconds * 0.1);
        fuzz_link(dice, seconds * 0.5);
        fuzz_ring_memory(dice, seconds * 0.4);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "seed %d: %s\n", seed, error.what());
        return 1;
    }
    std::printf("fuzz of %d s with seed %d\n", seconds, seed);
    return 0;
}

}  // namespace

int main(int count, char** values) {
    if (count > 1 && std::strcmp(values[1], "--fuzz") == 0)
        return fuzz(argument(count, values, 2, 10), argument(count, values, 3, 1));
    if (count > 1 && std::strcmp(values[1], "--faults") == 0) return faults();
    const int generations = argument(count, values, 1, 50);
    const int ranks = argument(count, values, 2, 4);
    const int hosts = argument(count, values, 3, 1);
    const int seed = argument(count, values, 4, 1);
    Options options;
    if (has_flag(count, values, "--past-cache")) options.staging = StagingWay::Memory;

    const bool devices = has_flag(count, values, "--devices");

    std::vector<std::shared_ptr<RingMemory>> memories{RingMemory::create(0, ranks, kArena)};
    while (static_cast<int>(memories.size()) < ranks)
        memories.push_back(memories.front()->share(static_cast<int>(memories.size())));
    const Links made = hosts > 1 ? make_links(ranks) : Links{};
    std::vector<int> host_of, everyone;
    for (int rank = 0; rank < ranks; ++rank) {
        host_of.push_back(rank % hosts);
        everyone.push_back(rank);
    }

    std::atomic<int> begun{0};
    std::atomic<int> failures{0};
    std::atomic<std::size_t> operations{0};
    std::atomic<int> ended{0};
    std::vector<std::thread> threads;
    for (int index = 0; index < ranks; ++index) {
        threads.emplace_back([&, index] {
            const auto& ring_memory = memories[static_cast<std::size_t>(index)];
            const auto device = devices ? std::make_unique<FakeDevice>(index) : nullptr;
            Rank rank({ring_memory, hosts > 1 ? made.links[static_cast<std::size_t>(index)] : nullptr, host_of, index,
                       options, device.get()},
                      static_cast<std::uint64_t>(seed));
            std::uint64_t last = 0;
            for (int generation = 1; generation <= generations && failures == 0; ++generation) {
                begun = std::max(begun.load(), generation);
                try {
                    // On one host the ranks agree on the number of the generation, each starting from its own.
                    last = hosts > 1
                               ? static_cast<std::uint64_t>(generation)
                               : agree_on_generation(*ring_memory, {everyone, last + static_cast<std::uint64_t>(index)},
                                                     kAgreement, nullptr);
                    rank.run(make_plan(static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(generation), ranks),
                             last);
                } catch (const std::exception& error) {
                    ++failures;
                    std::fprintf(stderr, "rank %d, generation %d: %s\n", index, generation, error.what());
                }
            }
            operations += rank.operations();
            ++ended;
        });
    }

    auto since = std::chrono::steady_clock::now();
    for (int last = 0; ended < ranks; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
        if (begun != last) {
            last = begun;
            since = std::chrono::steady_clock::now();
        } else if (std::chrono::steady_clock::now() - since > kStuck) {
            std::fprintf(stderr, "generation %d does not end (seed %d)\n", last, seed);
            std::abort();  // leaves a core with the stacks of all ranks
        }
    }
    for (std::thread& thread : threads) thread.join();

    std::size_t left = 0;
    for (const auto& ring_memory : memories) {
        ring_memory->release(ring_memory->allocate(1));  // reclaims blocks that the others have released
        left += ring_memory->allocated();
    }
    std::printf("%d ranks, %d hosts, %d generations, %zu operations, %zu failures\n", ranks, hosts, generations,
                operations.load(), static_cast<std::size_t>(failures.load()));
    if (hosts == 1 && left != 0) std::fprintf(stderr, "%zu bytes of ring memory were not given back\n", left);
    return failures != 0 || (hosts == 1 && left != 0) ? 1 : 0;
}
