// The thread that carries out queued operations of all groups of one generation. It starts with the first queued
// operation and sleeps while there is none.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/base/wait.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring {

class Progress {
   public:
    // `bell` is the doorbell of this rank, which other ranks ring.
    Progress(Doorbell& bell, const SpinPolicy& spin) : shared_(bell), spin_(spin) {}
    ~Progress();

    void add(Communicator* communicator);
    void remove(Communicator* communicator);
    // Leaves all groups of the generation, when this rank leaves the generation.
    void leave_groups() noexcept;
    // Calls `call` while the progress thread serves no group. That thread must not call this.
    template <class Call>
    void exclusively(Call&& call) {
        const std::lock_guard<std::mutex> lock(mutex_);
        call();
    }
    // Starts the thread if it does not run. Call it before anything is queued, because it throws when no thread can
    // start.
    void begin();
    // Wakes the thread, if it runs, to serve the queues.
    void nudge() noexcept;
    // Makes the thread serve the queues within kWatch; repeated calls within a short time cost almost nothing.
    void watch() noexcept {
        watched_.fetch_add(1, std::memory_order_seq_cst);
        if (!watching_.load(std::memory_order_seq_cst)) nudge();
    }
    // Serves them now, if that has not happened since.
    void end_watch() noexcept {
        if (watching_.load(std::memory_order_seq_cst)) nudge();
    }

   private:
    void main();
    // Serves every group once; remembers whether any has work.
    bool scan();

    Doorbell& shared_;
    SpinPolicy spin_;
    const Owner owner_;
    Doorbell own_;
    std::mutex mutex_;
    std::vector<Communicator*> communicators_;
    std::once_flag started_;
    std::unique_ptr<std::thread> thread_;
    std::atomic<bool> stop_{false};
    std::atomic<std::uint32_t> wishes_{0};   // nudge() calls so far
    std::atomic<std::uint32_t> watched_{0};  // watch() calls so far
    std::atomic<bool> watching_{false};      // it looks every kWatch
    bool any_work_ = false;
    std::chrono::microseconds tick_{kSleep};  // until its next look, if it is not woken
};

}  // namespace ring
