#include "ring/device/reaper.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "ring/base/no_signals.hpp"
#include "ring/base/wait.hpp"

namespace ring {
namespace {

constexpr double kCloseLimit = 2.0;              // seconds; a rank that is still busy closes late
constexpr std::int64_t kCloses = 3'000'000'000;  // ns that closing usually takes at most
constexpr std::chrono::milliseconds kPause{1};

}  // namespace

std::shared_ptr<const Reaper> Reaper::begin(std::vector<std::shared_ptr<NcclCommunicator>> all, Way way) {
    auto reaper = std::make_shared<Reaper>();
    if (all.empty()) {
        reaper->over_ = true;
        return reaper;
    }
    const NoSignals inherited;
    try {
        std::thread([reaper, all = std::move(all), way] {
            if (way == Way::Close) {
                close(all);
            } else {
                abort(all);
            }
            reaper->over_.store(true, std::memory_order_release);
        }).detach();
    } catch (const std::system_error&) {  // no thread: the communicators never end
    }
    return reaper;
}

void Reaper::wait() const {
    const std::int64_t deadline = monotonic_ns() + kCloses;
    while (!over() && monotonic_ns() < deadline) std::this_thread::sleep_for(kPause);
}

void Reaper::close(const std::vector<std::shared_ptr<NcclCommunicator>>& all) {
    const std::int64_t deadline = deadline_after(kCloseLimit);
    bool closed = true;
    for (const auto& one : all) closed &= one->nccl().ncclCommFinalize(one->handle()) % Nccl::kInProgress == 0;
    const auto finalized = [](const auto& one) {
        try {
            return one->ready();
        } catch (const DeviceError&) {
            return false;
        }
    };
    while (closed && !std::all_of(all.begin(), all.end(), finalized)) {
        closed = !is_past(deadline);
        std::this_thread::sleep_for(kPause);
    }
    if (!closed) return abort(all);
    for (const auto& one : all) one->nccl().ncclCommDestroy(one->handle());
}

void Reaper::abort(const std::vector<std::shared_ptr<NcclCommunicator>>& all) {
    const Nccl& nccl = all.front()->nccl();
    nccl.ncclGroupStart();
    for (const auto& one : all) nccl.ncclCommAbort(one->handle());
    nccl.ncclGroupEnd();
}

}  // namespace ring
