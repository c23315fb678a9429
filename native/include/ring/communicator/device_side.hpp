// The part of a communicator for tensors on devices: the agreement of its ranks, copies where host memory moves the
// data, and launched operations.
//
//   caller            progress thread                                              device
//   ready, enqueue -> header, gate -> ticket, launch ----------------------------> kernel
//   <- launched: its stream waits for `done`                                       done
//                     <- done: the tensors are free, errors are known ------------
//
// An operation of a group passes its gate before its launch, so mismatches, interruptions and missing ranks are found
// while no kernel waits. A launched operation is polled until it is done, and is aborted with the generation.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ring/collectives/device/device_stream.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring {

class DeviceOpening;

class DeviceSide {
   public:
    // What moves tensors on devices.
    enum class Way {
        Unknown,  // the ranks have not agreed yet
        Nccl,
        Host,   // through host memory, for a reason
        Error,  // some rank insists on NCCL, which cannot be used for a reason
    };
    DeviceSide(Communicator& owner, std::shared_ptr<DeviceStream> stream);
    // Aborts operations under way; returns when none of their kernels runs, or one cannot be ended.
    ~DeviceSide();
    DeviceSide(const DeviceSide&) = delete;
    DeviceSide& operator=(const DeviceSide&) = delete;

    // Called by the caller of an operation with tensors on a device: records an event after the work on its stream.
    void prepare(Work& work) const;
    // Any thread.
    bool is_quiet() const { return under_way_.load(std::memory_order_seq_cst) == 0; }
    std::pair<std::string, std::string> transport() const;

    // The rest is for the thread that carries out operations.
    using Served = Communicator::Served;
    // Before an operation begins: copies its tensors to host memory, if host memory moves them. False until that is
    // done.
    bool fetch(Work& work);
    // After the operation has posted its header at that gate.
    void posted(const Work& work);
    // Whether the headers are for tensors on devices and the ranks have not agreed yet on what moves those; then the
    // operation begins again after `agree`.
    bool must_agree(const std::vector<Header>& headers) const;
    void agree(Work& work);
    bool is_agreeing(const Work& work) const;
    Served serve_agreement();
    // Fills in what the algorithm of that path needs for devices. Throws Unsupported.
    void take_part(Work& work, Operation& operation, const Path& path);
    // The operation is launched, or its results are in host memory: the device completes it.
    void launch(const std::shared_ptr<Work>& work);
    // A joined rank has no part in the operation of the others.
    void take_no_part();
    // The part of a joined rank was launched; its join continues.
    void launch_for_joined(Work& work);
    // The operation has failed. True where a kernel may still touch its tensors: then it ends when none does.
    bool fail(const std::shared_ptr<Work>& work, const std::exception_ptr& error);
    // Makes `other` end together with `work`, which was launched.
    void follow(const Work& work, const std::shared_ptr<Work>& other);
    // Polls the launched operations.
    Served serve();

    DeviceStream& stream() const { return *stream_; }
    Way way() const { return way_; }

    // --- for the agreement ---
    // Null in a group of one rank, and until the ranks connect.
    NcclCommunicator* nccl() const { return nccl_.get(); }
    void connect(const NcclId& id, NcclCommunicator::Key key, int index);
    // Takes one that the stream has adopted.
    void reuse(std::shared_ptr<NcclCommunicator> nccl) { nccl_ = std::move(nccl); }
    void conclude(Way way, std::string reason);
    // Gives the communicator up; null where there is none.
    std::shared_ptr<const Reaper> disconnect();

   private:
    // Operations that the device carries out.
    struct Launched {
        std::vector<std::shared_ptr<Work>> works;  // none: a joined rank's part
        std::shared_ptr<DeviceWork> device;
        std::exception_ptr error;
        std::int64_t deadline = 0;
    };
    bool through_host(const Work& work) const;
    void bring_back(Work& work);
    void watch(Launched launched);
    void check_launched();
    void finish(Launched& launched, std::exception_ptr error, bool must_keep) noexcept;
    void count_end();
    void abort(const std::exception_ptr& error) noexcept;

    Communicator& owner_;
    std::shared_ptr<DeviceStream> stream_;
    std::shared_ptr<NcclCommunicator> nccl_;
    Way way_;
    std::string reason_;
    std::unique_ptr<DeviceOpening> opening_;
    std::deque<Launched> launched_;
    std::atomic<std::size_t> under_way_{0};
    std::int64_t next_check_ = 0;
    std::exception_ptr error_;  // of the abort that is under way
    mutable std::mutex mutex_;
    std::pair<std::string, std::string> transport_;
};

}  // namespace ring
