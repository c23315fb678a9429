// The error of an operation that failed on its device after its call had returned. A later call of the generation
// raises it, or its end does.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace ring {

// Any thread.
class LateFailure {
   public:
    // Remembers the first error.
    void note(std::exception_ptr error) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!error_) error_ = std::move(error);
    }
    // Drops all errors from now on: a caller has already got the error that ended the generation, or has ended it.
    void tell() noexcept { told_.store(true, std::memory_order_seq_cst); }
    // The first error; null where there is none, after `tell`, and from the second call on.
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
