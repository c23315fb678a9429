#include "support.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <vector>

#include "ring/transport/tcp_link.hpp"

namespace ring::test {
namespace {

constexpr double kStuck = 120.0;  // seconds

// Sends the rest of messages that were cancelled half sent.
class Attendant {
   public:
    explicit Attendant(std::vector<std::shared_ptr<TcpLink>> links) : links_(std::move(links)) {}
    ~Attendant() {
        stopping_ = true;
        thread_.join();
    }

   private:
    void attend() {
        std::vector<pollfd> asking;
        for (const auto& link : links_) asking.push_back({link->attention_fd(), POLLIN, 0});
        while (!stopping_) {
            ::poll(asking.data(), asking.size(), 2);
            for (std::size_t i = 0; i < links_.size(); ++i) {
                if (asking[i].revents == 0) continue;
                links_[i]->take_wanted();
                while (links_[i]->flush() && !stopping_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
    }

    std::vector<std::shared_ptr<TcpLink>> links_;
    std::atomic<bool> stopping_{false};
    std::thread thread_{[this] { attend(); }};
};

}  // namespace

Links make_links(int size) {
    std::vector<std::shared_ptr<TcpLink>> links;
    for (int rank = 0; rank < size; ++rank) {
        const auto link = std::make_shared<TcpLink>(size);
        for (int other = 0; other < rank; ++other) {
            int ends[2];
            expect(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
            link->connected(other, ends[0]);
            links[static_cast<std::size_t>(other)]->connected(rank, ends[1]);
        }
        links.push_back(link);
    }
    Links made{{links.begin(), links.end()}};
    made.attendant = std::make_shared<Attendant>(std::move(links));
    return made;
}

std::shared_ptr<Communicator> Place::open(std::uint64_t generation, const Interruption& check) const {
    Communicator::Setup setup;
    setup.ring_memory = ring_memory;
    for (int other = 0; other < size; ++other) {
        setup.ranks.push_back(other);
        if (!link || other == rank) setup.local.push_back(other);
    }
    if (link) setup.host_of = setup.addresses = setup.ranks;
    setup.link = link;
    setup.index = rank;
    setup.generation = generation;
    setup.options = options;
    return Communicator::open(std::move(setup), kTimeout, check);
}

void as_ranks(const char* test, int size, bool as_hosts, const std::function<void(Place)>& body) {
    std::vector<std::shared_ptr<RingMemory>> memories{RingMemory::create(0, size, kArena)};
    for (int rank = 1; rank < size; ++rank) memories.push_back(memories.front()->share(rank));
    const Links made = as_hosts ? make_links(size) : Links{};
    std::mutex mutex;
    std::exception_ptr failure;
    std::atomic<int> ended{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        const auto& ring_memory = memories[static_cast<std::size_t>(rank)];
        Place place{rank, size, ring_memory, as_hosts ? made.links[static_cast<std::size_t>(rank)] : nullptr, {}};
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
