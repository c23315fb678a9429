// Helpers of the tests of single faults: ranks as threads that must end in time, and communicators over them.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ring/communicator/communicator.hpp"

namespace ring::test {

constexpr std::size_t kArena = 64 << 20;
constexpr double kTimeout = 60.0;  // seconds; a sanitizer on a busy machine is slow

inline void expect(bool condition, const std::string& what) {
    if (!condition) throw std::logic_error(what);
}

// Whether the call throws `Failure`.
template <class Failure>
bool fails(const std::function<void()>& call) {
    try {
        call();
    } catch (const Failure&) {
        return true;
    }
    return false;
}

struct Place {
    int rank, size;
    std::shared_ptr<RingMemory> ring_memory;
    std::shared_ptr<Link> link;  // null where the ranks share a host, else each is a host of its own

    Options options = {};

    std::shared_ptr<Communicator> open(std::uint64_t generation = 1, const Interruption& check = nullptr) const;
};

// A link for each rank, which are connected as ranks of several hosts are.
struct Links {
    std::vector<std::shared_ptr<Link>> links;
    std::shared_ptr<void> attendant = nullptr;  // a thread that calls flush
};
Links make_links(int size);

// Runs the body once per rank, each in a thread, and throws the exception of one of them. Ends the process with the
// name of the test if ranks are stuck.
void as_ranks(const char* test, int size, bool as_hosts, const std::function<void(Place)>& body);

// Carries out an operation, inline or queued, and throws its error.
void carry_out(Communicator& ring, Request request, bool queued, double timeout = kTimeout,
               const Interruption& check = nullptr);

// A function that returns the seconds since this call.
std::function<double()> stopwatch();

// Returns when the condition holds; throws where it does not in time.
void wait_for(const std::function<bool()>& condition, const char* what);

}  // namespace ring::test
