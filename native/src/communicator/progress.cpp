#include "ring/communicator/progress.hpp"

#include <algorithm>
#include <string>
#include <system_error>

#include "ring/base/errors.hpp"
#include "ring/base/no_signals.hpp"

namespace ring {
namespace {

constexpr std::chrono::microseconds kWatch{1000};
constexpr int kWatches = 20;  // checks without work before the thread sleeps until it is woken

// Pause between two polls of operations on a device: only freeing memory depends on them.
constexpr std::chrono::microseconds kOnDevice{500};

}  // namespace

Progress::~Progress() {
    if (!owner_.is_this_process()) {
        // A forked process has no such thread. It leaks the handle: even a detach would read the thread's memory, which
        // the C library may have freed.
        static_cast<void>(thread_.release());
        return;
    }
    stop_.store(true, std::memory_order_seq_cst);
    nudge();
    if (thread_) thread_->join();
}

void Progress::add(Communicator* communicator) {
    const std::lock_guard<std::mutex> lock(mutex_);
    communicators_.push_back(communicator);
}

void Progress::remove(Communicator* communicator) {
    const std::lock_guard<std::mutex> lock(mutex_);
    communicators_.erase(std::remove(communicators_.begin(), communicators_.end(), communicator), communicators_.end());
}

void Progress::leave_groups() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Communicator* communicator : communicators_) communicator->leave_with_generation();
}

void Progress::nudge() noexcept {
    wishes_.fetch_add(1, std::memory_order_seq_cst);
    own_.ring();
    shared_.ring();
}

void Progress::begin() {
    // Not under the mutex: the thread holds that while it moves data, and a caller that queues an operation must not
    // wait for it.
    std::call_once(started_, [this] {
        const NoSignals inherited;
        try {
            thread_ = std::make_unique<std::thread>([this] { main(); });
        } catch (const std::system_error& error) {
            throw Error(std::string("no thread can be started for queued operations: ") + error.what());
        }
    });
}

bool Progress::scan() {
    const std::lock_guard<std::mutex> lock(mutex_);
    any_work_ = false;
    tick_ = kSleep;
    bool moved = false;
    for (Communicator* communicator : communicators_) {
        const auto served = communicator->serve();
        const auto messages = communicator->serve_messages();
        any_work_ |= served != Communicator::Served::Idle || messages != Communicator::Served::Idle;
        if (served == Communicator::Served::Polling || messages == Communicator::Served::Polling) tick_ = kPoll;
        if (served == Communicator::Served::OnDevice) tick_ = std::min(tick_, kOnDevice);
        moved |= served == Communicator::Served::Moved || served == Communicator::Served::Done ||
                 messages == Communicator::Served::Moved;
    }
    return moved;
}

void Progress::main() {
    const auto stopped = [this] { return stop_.load(std::memory_order_seq_cst); };
    std::uint32_t watched = 0;
    int watches_left = 0;
    while (!stopped()) {
        const std::uint32_t wishes = wishes_.load(std::memory_order_seq_cst);
        const auto wished = [&] { return stopped() || wishes_.load(std::memory_order_seq_cst) != wishes; };
        if (scan()) continue;
        if (any_work_) {
            watching_.store(false, std::memory_order_seq_cst);
            // Another rank, or a new call of `nudge`, makes the next step possible; both ring the shared bell.
            const auto tick = tick_;
            wait_until(
                shared_, tick == kPoll ? spin_.polling() : spin_,
                [&] { return wished() || scan() || !any_work_ || tick_ != tick; }, [] {}, tick);
            continue;
        }
        if (watched != watched_.load(std::memory_order_seq_cst)) {
            watched = watched_.load(std::memory_order_seq_cst);
            watches_left = kWatches;
        }
        watching_.store(watches_left > 0, std::memory_order_seq_cst);
        if (watches_left > 0) {
            --watches_left;
            const Sleeper sleeper(own_);
            const std::uint32_t seen = own_.rings.load(std::memory_order_seq_cst);
            if (!wished()) sleep_on(own_, seen, kWatch);
        } else if (watched == watched_.load(std::memory_order_seq_cst)) {
            wait_until(own_, spin_, wished, [] {}, kForever);
        }
    }
}

}  // namespace ring
