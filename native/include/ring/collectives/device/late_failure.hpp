// An operation of an epoch that failed on its device after its call had returned. A later call raises it, or else the
// end of the epoch does.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace ring {

// Any thread.
class LateFailure {
   public:
    // One has failed.
    void note(std::exception_ptr error) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!error_) error_ = std::move(error);
    }
    // A caller has been given an error that ended the epoch, or has ended it: what else has failed is no news.
    void tell() noexcept { told_.store(true, std::memory_order_seq_cst); }
    // The first that was noted where nobody has been told; null else, and from the second call on.
    std::exception_ptr take() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!error_ || told_.exchange(true, std::memory_order_seq_cst)) return nullptr;
        return std::exchange(error_, nullptr);
    }

   private:
    std::atomic<bool> told_{false};
    std::mutex mutex_;
    std::exception_ptr error_;
};

}  // namespace ring
