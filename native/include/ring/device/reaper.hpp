// Ends communicators of NCCL on a thread of its own, because some of its calls may never return.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "ring/device/nccl.hpp"

namespace ring {

class Reaper {
   public:
    enum class Way {
        Close,  // no operation is under way: lets data on the network arrive, then ends them
        Abort,  // ends their kernels, wherever they are
    };

    // Ends all of them together: two aborts one after the other can wait for each other's kernels. Never waits.
    static std::shared_ptr<const Reaper> begin(std::vector<std::shared_ptr<NcclCommunicator>> all, Way way);
    // Whether the communicators have ended, with their kernels.
    bool over() const { return over_.load(std::memory_order_acquire); }
    // Returns when they have, or when `Close` has had its time.
    void wait() const;

   private:
    static void close(const std::vector<std::shared_ptr<NcclCommunicator>>& all);
    static void abort(const std::vector<std::shared_ptr<NcclCommunicator>>& all);

    std::atomic<bool> over_{false};
};

}  // namespace ring
