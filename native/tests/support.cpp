#include "support.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <vector>

namespace ring::test {
namespace {

constexpr double kStuck = 120.0;  // seconds

}  // namespace

std::shared_ptr<Communicator> Place::open(std::uint64_t epoch, const Interruption& check) const {
    Communicator::Setup setup;
    setup.domain = domain;
    for (int other = 0; other < size; ++other) {
        setup.ranks.push_back(other);
        if (!link || other == rank) setup.local.push_back(other);
    }
    if (link) setup.host_of = setup.addresses = setup.ranks;
    setup.link = link;
    setup.index = rank;
    setup.epoch = epoch;
    setup.options = options;
    return Communicator::open(std::move(setup), kTimeout, check);
}

void as_ranks(const char* test, int size, bool as_hosts, const std::function<void(Place)>& body) {
    std::vector<std::shared_ptr<Domain>> domains{Domain::create(0, size, kArena)};
    for (int rank = 1; rank < size; ++rank) domains.push_back(domains.front()->share(rank));
    const std::uint64_t offset = as_hosts ? reserve_memory_link(*domains.front()) : 0;
    std::mutex mutex;
    std::exception_ptr failure;
    std::atomic<int> ended{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        const auto& domain = domains[static_cast<std::size_t>(rank)];
        Place place{rank, size, domain, as_hosts ? make_memory_link(domain, offset) : nullptr, {}};
        threads.emplace_back([&, place = std::move(place)]() mutable {
            try {
                body(std::move(place));
            } catch (...) {
                const std::lock_guard<std::mutex> lock(mutex);
                if (!failure) failure = std::current_exception();
            }
            ++ended;
        });
    }
    const auto elapsed = stopwatch();
    while (ended < size) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        if (elapsed() < kStuck) continue;
        std::fprintf(stderr, "%s: %d of %d ranks do not end\n", test, size - ended, size);
        std::abort();  // leaves a core with the stacks of all ranks
    }
    for (std::thread& thread : threads) thread.join();
    if (failure) std::rethrow_exception(failure);
}

void carry_out(Communicator& ring, Request request, bool queued, double timeout, const Interruption& check) {
    const auto work = queued ? ring.start(std::move(request), timeout) : ring.run(std::move(request), timeout, check);
    ring.wait(*work, 0, check);
    work->get();
}

std::function<double()> stopwatch() {
    const auto begun = std::chrono::steady_clock::now();
    return [begun] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
}

void wait_for(const std::function<bool()>& condition, const char* what) {
    const auto elapsed = stopwatch();
    while (!condition()) {
        expect(elapsed() < kTimeout, std::string("in vain waited until ") + what);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace ring::test
