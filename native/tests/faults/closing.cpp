// Communicators that are closed while other threads of the rank use them.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "faults/faults.hpp"
#include "made_group.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

bool waits(const Communicator& ring) {
    return ring.activity()[static_cast<std::size_t>(ring.index())].state == RankState::Waiting;
}

Request sum(std::vector<float>& tensor) {
    Request request;
    request.kind = OpKind::Allreduce;
    request.dtype = DType::Float32;
    request.shape = {static_cast<std::int64_t>(tensor.size())};
    const auto* input = reinterpret_cast<const std::byte*>(tensor.data());
    request.pieces.push_back({input, reinterpret_cast<std::byte*>(tensor.data()), tensor.size()});
    return request;
}

// An operation on another thread succeeds, and only then the rank leaves the group.
void closed_beside_an_operation(bool queued) {
    std::atomic<bool> closes{false}, joins{false};
    as_ranks("closed beside an operation", 2, false, [&](Place place) {
        const auto ring = place.open();
        std::vector<float> tensor(500'000, 1.0f);
        if (place.rank == 1) {
            wait_for([&] { return closes.load(); }, "the other rank closes");
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            joins = true;
            carry_out(*ring, sum(tensor), false);
        } else {
            std::shared_ptr<Work> work;
            std::thread other([&] {
                work = queued ? ring->start(sum(tensor), kTimeout) : ring->run(sum(tensor), kTimeout, nullptr);
                ring->wait(*work, 0, nullptr);
            });
            wait_for([&] { return waits(*ring); }, "the other thread waits");
            closes = true;
            ring->close(nullptr);
            const bool had_joined = joins;
            other.join();
            expect(had_joined, "a communicator was left in the middle of an operation");
            expect(!fails<Error>([&] { work->get(); }), "an operation failed because its communicator was closed");
        }
        expect(tensor.front() == 2.0f && tensor.back() == 2.0f, "an operation was not completed");
    });
}

// Operations that other threads begin meanwhile either complete, or raise that the communicator is closed.
void closed_under_a_stream_of_operations() {
    for (std::uint64_t generation = 1; generation <= 20; ++generation)
        as_ranks("closed under a stream of operations", 1, false, [&](Place place) {
            const auto ring = place.open(generation);
            std::atomic<int> completed{0};
            std::thread other([&] {
                while (!fails<InvalidArgument>([&] { carry_out(*ring, {}, completed % 2 == 0); })) ++completed;
            });
            wait_for([&] { return completed > 10; }, "operations complete");
            ring->close(nullptr);
            other.join();
            expect(!ring->aborted(), "a communicator that was closed in good order was aborted");
        });
}

// A signal handler runs inside the operation that it interrupts, so it cannot wait for the operation.
void used_from_within_an_operation() {
    for (const bool closes : {false, true})
        as_ranks("used from within an operation", 2, false, [&](Place place) {
            const auto ring = place.open();
            if (place.rank == 1) {
                wait_for([&] { return ring->aborted(); }, "the other rank fails");
                return;
            }
            const auto within = [&] { closes ? ring->close(nullptr) : carry_out(*ring, {}, false); };
            const auto barrier = [&] { carry_out(*ring, {}, false, kTimeout, within); };
            expect(closes ? fails<Aborted>(barrier) : fails<InvalidArgument>(barrier),
                   "an operation did not end although its communicator was used within it");
            expect(ring->closed() == closes, "a communicator was not closed from within an operation");
        });
}

// A rank that closes its generation, but not a group of it, has left the group too, and other hosts learn of it.
void closed_without_its_group(bool busy) {
    std::atomic<bool> told{false};
    as_ranks("closed without its group", 2, true, [&](Place place) {
        const auto ring = place.open();
        const auto group = make_group(ring, {0, 1}, kTimeout);
        std::vector<float> tensor(busy ? 500'000 : 5, 1.0f);
        if (place.rank == 0) {
            carry_out(*group, sum(tensor), false);
            std::string said;
            try {
                carry_out(*group, {}, false, kTimeout / 6);
            } catch (const Error& error) {
                said = error.what();
            }
            told = true;
            expect(said.find("rank 1 has left") != std::string::npos,
                   "a rank waits for a host that has closed its generation: " + said);
            return;
        }
        std::shared_ptr<Work> begun;
        if (busy) {
            begun = group->start(sum(tensor), kTimeout);
        } else {
            carry_out(*group, sum(tensor), false);
        }
        ring->close(nullptr);
        if (busy) group->wait(*begun, 0, nullptr);
        // The group is not destroyed, which would tell the other host too, before that has failed.
        wait_for([&] { return told.load(); }, "the other host fails");
    });
}

}  // namespace

void check_closing() {
    closed_without_its_group(false);
    closed_without_its_group(true);
    closed_beside_an_operation(false);
    closed_beside_an_operation(true);
    closed_under_a_stream_of_operations();
    used_from_within_an_operation();
}

}  // namespace ring::test
