// The kernels of the fake NCCL: what they share between processes, how they wait for one another, and what they
// compute.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_numbers.hpp"

namespace {

constexpr int kSuccess = 0, kSystem = 2, kInternal = 3, kArgument = 4, kUsage = 5, kRemote = 6, kInProgress = 7;
constexpr int kRanks = 8;
constexpr std::size_t kSlot = 256 << 10;
constexpr int kFirstOwnOp = 100;

[[noreturn]] void broken(const std::string& what) {
    std::fprintf(stderr, "fake NCCL: %s\n", what.c_str());
    std::fflush(stderr);
    _exit(70);
}

struct Settings {
    std::mutex mutex;
    std::map<std::string, long> values;
};
// Never destroyed: kernels run until the process ends.
Settings& settings() {
    static auto* all = new Settings;
    return *all;
}
long setting(const std::string& name, long otherwise) {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    const auto found = settings().values.find(name);
    if (found != settings().values.end()) return found->second;
    const char* text = std::getenv(("FAKE_NCCL_" + name).c_str());
    return text != nullptr ? std::atol(text) : otherwise;
}

void pause_up_to(long microseconds) {
    thread_local std::mt19937 random(std::random_device{}());
    if (microseconds > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned long>(microseconds)));
}

// What the processes of a communicator share.
struct Meeting {
    std::atomic<int> here;
    std::atomic<int> arrived;
    std::atomic<long> phase;
    std::atomic<std::uint64_t> signature[kRanks];
    std::atomic<std::uint64_t> sends[kRanks][kRanks];  // bytes
    std::atomic<std::uint64_t> receives[kRanks][kRanks];
    char data[kRanks][kSlot];
};

struct Call {
    enum Kind { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Send, Receive } kind;
    const char* input;
    char* output;
    std::size_t count;
    int dtype, op, peer;  // peer: or root
    double factor;
    void* stream;
};

struct Communicator {
    Communicator() = default;
    ~Communicator() {
        if (meeting != nullptr) munmap(meeting, sizeof(Meeting));
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    Meeting* meeting = nullptr;
    int size = 0, rank = 0, device = 0;
    std::atomic<bool> aborted{false};
    std::atomic<int> state{kInProgress};
    std::thread connecting;
    std::atomic<bool> in_use{false};
    std::map<int, double> factors;  // of its own operations
    void* stream = nullptr;
};

// A communicator's part of a kernel. Its waits end when all ranks have come, or the communicator is aborted.
class Kernel {
   public:
    Kernel(Communicator* communicator, std::vector<Call> calls) : all_(*communicator), calls_(std::move(calls)) {}

    void run() {
        pause_up_to(setting("kernel_us", 0));
        for (const Call& call : calls_)
            if (call.kind != Call::Send && call.kind != Call::Receive && !collective(call)) return;
        exchange();
    }

   private:
    Meeting& meeting() { return *all_.meeting; }

    // An aborted communicator leaves the others' meeting as it is.
    bool barrier() {
        if (all_.aborted.load()) return false;
        const long phase = meeting().phase.load();
        if (meeting().arrived.fetch_add(1) + 1 == all_.size) {
            meeting().arrived.store(0);
            meeting().phase.fetch_add(1);
            return true;
        }
        const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(setting("deadlock_ms", 20000));
        while (meeting().phase.load() == phase) {
            if (all_.aborted.load()) return false;
            if (std::chrono::steady_clock::now() > limit) broken("a kernel waits for another rank that does not come");
            std::this_thread::sleep_for(std::chrono::microseconds(30));
        }
        return true;
    }

    bool agree(std::uint64_t signature) {
        if (all_.aborted.load()) return false;
        meeting().signature[all_.rank].store(signature);
        if (!barrier()) return false;
        for (int rank = 0; rank < all_.size; ++rank)
            if (meeting().signature[rank].load() != signature)
                broken("ranks launch different operations, which is undefined");
        return true;
    }

    double combined(const Call& call, std::size_t i) {
        const std::size_t item = item_size(call.dtype);
        double value = load(meeting().data[0] + i * item, call.dtype) * call.factor;
        for (int rank = 1; rank < all_.size; ++rank) {
            const double other = load(meeting().data[rank] + i * item, call.dtype) * call.factor;
            value = call.op == 1   ? value * other
                    : call.op == 2 ? std::max(value, other)
                    : call.op == 3 ? std::min(value, other)
                                   : value + other;
        }
        if (call.op == 4) value /= all_.size;
        return value;
    }

    bool collective(const Call& call) {
        const std::size_t item = item_size(call.dtype);
        const bool scatters = call.kind == Call::ReduceScatter;
        const std::size_t total = call.count * static_cast<std::size_t>(scatters ? all_.size : 1);
        const int op = call.op >= kFirstOwnOp ? kFirstOwnOp : call.op;
        if (!agree(
                (((call.count * 16 + static_cast<std::size_t>(call.kind)) * 16 + static_cast<std::size_t>(call.dtype)) *
                     128 +
                 static_cast<std::size_t>(op)) *
                    16 +
                static_cast<std::size_t>(call.peer)))
            return false;
        for (std::size_t begin = 0; begin < total || begin == 0; begin += kSlot / item) {
            const std::size_t count = std::min(total - begin, kSlot / item);
            if (call.kind != Call::Broadcast || call.peer == all_.rank)
                copy_bytes(meeting().data[all_.rank], call.input + begin * item, count * item);
            if (!barrier()) return false;
            give(call, begin, count);
            if (!barrier()) return false;
        }
        return true;
    }

    void give(const Call& call, std::size_t begin, std::size_t count) {
        const std::size_t item = item_size(call.dtype);
        if (call.kind == Call::Broadcast) {
            copy_bytes(call.output + begin * item, meeting().data[call.peer], count * item);
        } else if (call.kind == Call::AllGather) {
            for (int rank = 0; rank < all_.size; ++rank)
                copy_bytes(call.output + (static_cast<std::size_t>(rank) * call.count + begin) * item,
                           meeting().data[rank], count * item);
        } else if (call.kind != Call::Reduce || call.peer == all_.rank) {
            const auto wrong = static_cast<double>(setting("wrong", 0));
            const std::size_t first =
                call.kind == Call::ReduceScatter ? static_cast<std::size_t>(all_.rank) * call.count : 0;
            for (std::size_t i = 0; i < count; ++i)
                if (begin + i >= first && begin + i < first + call.count)
                    save(call.output + (begin + i - first) * item, call.dtype, combined(call, i) + wrong);
        }
    }

    // All sends and receives of the group at once.
    void exchange() {
        const Call* sends[kRanks] = {};
        const Call* receives[kRanks] = {};
        bool any = false;
        for (const Call& call : calls_) {
            if (call.kind != Call::Send && call.kind != Call::Receive) continue;
            const Call*& place = call.kind == Call::Send ? sends[call.peer] : receives[call.peer];
            if (place != nullptr) broken("two messages to one rank in a group are not faked");
            place = &call;
            any = true;
        }
        if (!any) return;
        for (int rank = 0; rank < all_.size; ++rank) {
            meeting().sends[all_.rank][rank].store(sends[rank] != nullptr ? sends[rank]->count : 0);
            meeting().receives[all_.rank][rank].store(receives[rank] != nullptr ? receives[rank]->count : 0);
        }
        if (!agree(7)) return;
        const std::size_t part = kSlot / kRanks;
        std::size_t most = 0;
        for (int from = 0; from < all_.size; ++from)
            for (int to = 0; to < all_.size; ++to) {
                most = std::max<std::size_t>(most, meeting().sends[from][to].load());
                if (meeting().sends[from][to].load() != meeting().receives[to][from].load())
                    broken("a rank sends more or less than another one receives");
            }
        for (std::size_t begin = 0; begin < most; begin += part) {
            for (int rank = 0; rank < all_.size; ++rank)
                if (sends[rank] != nullptr && sends[rank]->count > begin)
                    copy_bytes(meeting().data[all_.rank] + static_cast<std::size_t>(rank) * part,
                               sends[rank]->input + begin, std::min(part, sends[rank]->count - begin));
            if (!barrier()) return;
            for (int rank = 0; rank < all_.size; ++rank)
                if (receives[rank] != nullptr && receives[rank]->count > begin)
                    copy_bytes(receives[rank]->output + begin,
                               meeting().data[rank] + static_cast<std::size_t>(all_.rank) * part,
                               std::min(part, receives[rank]->count - begin));
            if (!barrier()) return;
        }
    }

    Communicator& all_;
    std::vector<Call> calls_;
};

}  // namespace
