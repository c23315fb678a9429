// One operation under way, shared by the thread that waits for it and the thread that carries it out: its request, the
// machine that carries it out, its times and its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ring/base/wait.hpp"
#include "ring/collectives/device/device_work.hpp"
#include "ring/collectives/host/algorithm.hpp"
#include "ring/group/recorder.hpp"

namespace ring {

class Agreement;
class LateFailure;
class StandstillWatch;

class Work : public std::enable_shared_from_this<Work> {
   public:
    Work();
    ~Work();

    // --- for any thread ---
    enum class State : int { Pending, Launched, Done, Failed };
    State state() const { return state_.load(std::memory_order_seq_cst); }
    bool done() const { return state() >= State::Done; }
    // Whether it is done, or was launched on a device, where streams can wait for it.
    bool launched() const { return state() != State::Pending; }
    bool has_succeeded() const { return state() == State::Done; }
    // Makes later work on the stream wait for the results of an operation launched on a device; else does nothing.
    void hold_back(void* stream) const;
    // Rethrows the error of a failed operation.
    void get() const;
    std::string describe() const { return ring::describe(header); }
    // Rings when the state changes.
    Doorbell& bell() { return bell_; }

    // --- the request ---
    // Names: all ranks have posted it by name. JoinedForOnce: a joined rank's part of such an operation. Check: a test
    // of NCCL, whose failure does not end the generation.
    enum class Origin : char { Caller, Names, JoinedForOnce, Check };
    Request request;
    Header header;
    Origin origin = Origin::Caller;
    std::shared_ptr<const Work> first;  // of the same call: this one fails with it where the ranks mismatch
    std::int64_t deadline = 0;          // monotonic ns, 0 for none
    std::int64_t patience = 0;          // ns for which it continues after an abort: a commit between hosts
    bool is_check() const { return origin == Origin::Check; }

    // --- how far it is; for the thread that carries it out ---
    // Agreed: between hosts, the ranks have compared their headers; Moved: only notices that are on their way may still
    // fail it.
    enum class Stage : char { Queued, Posted, Agreed, Moved };
    struct Machine {
        Stage stage = Stage::Queued;
        std::unique_ptr<Agreement> agreement;
        std::unique_ptr<Algorithm> algorithm;
        bool takes_one_gate = false;
        std::uint64_t gate = 0;        // to wait for
        std::uint64_t gates = 0;       // passed since the agreement or algorithm began
        bool polling = false;          // waits for the link and not for a gate
        std::optional<Region> bounce;  // the copy of the tensors in ring memory
        std::int64_t next_check = 0;
        std::int64_t since = 0;  // when it was posted by name, or began to wait for gate `stalled_at`
        std::uint64_t stalled_at = 0;
        bool warned = false;                       // the warning of a stall was printed
        std::shared_ptr<StandstillWatch> watched;  // knows what it waits for
    };
    Machine machine;
    bool started() const { return machine.stage != Stage::Queued; }
    OperationTimes times;

    std::shared_ptr<DeviceWork> device;  // null where its tensors are in host memory, or it has none
    std::shared_ptr<LateFailure> late;   // of the generation, told of a raised error; null without devices

    // --- how it ended ---
    Result result;
    std::exception_ptr error;
    bool must_keep = false;  // its tensors, until the process ends: a kernel that cannot be aborted may touch them
    void finish(std::exception_ptr why) noexcept;
    // A device carries it out from now on.
    void launch() noexcept;

   private:
    void change(State state) noexcept;

    std::atomic<State> state_{State::Pending};
    Doorbell bell_;
};

}  // namespace ring
