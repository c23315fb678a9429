// The communication stream of this rank in a generation, and all that NCCL does on it.
//
// All kernels of all groups go through one stream in one order, so none of them waits behind one that the other ranks
// launch later. It ends as a whole: an abort of one communicator waits for the kernels of all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/collectives/device/device_work.hpp"
#include "ring/device/devices.hpp"
#include "ring/device/reaper.hpp"
#include "ring/group/host_group.hpp"

namespace ring {

// The error of an operation that failed on its device after its call had returned. A later call of the generation
// raises it, or its end does. Any thread.
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

// The order in which this rank launches the operations on devices of all its groups. Any thread: a communicator may be
// dropped while others are served.
class LaunchOrder {
   public:
    // The rank has posted the header of an operation that may be on devices. `id`, the same on all ranks, distinguishes
    // groups that span hosts; 0 for other groups.
    void enter(HostGroup& group, std::uint64_t gate, std::uint64_t id);
    // The rank has launched the operation, or will not.
    void leave(const HostGroup& group);
    // Whether the operation of that group is the next one. False as long as its ticket is not taken.
    bool is_next(HostGroup& group) const;

   private:
    struct Candidate {
        HostGroup* group;
        std::uint64_t gate;
        std::uint64_t id;
    };
    void erase(const HostGroup& group);

    mutable std::mutex mutex_;
    std::vector<Candidate> candidates_;
};

class DeviceStream {
   public:
    explicit DeviceStream(std::shared_ptr<Devices> devices) : devices_(std::move(devices)) {}
    // Leaves the communicators to the next generation. Where they are being aborted, waits for that, up to the abort
    // limit.
    ~DeviceStream();
    DeviceStream(const DeviceStream&) = delete;
    DeviceStream& operator=(const DeviceStream&) = delete;

    Devices& devices() const { return *devices_; }
    // The device that this rank uses in the generation: the one of the first call. Throws InvalidArgument for another
    // index, and DeviceError. Any thread.
    std::shared_ptr<DeviceContext> use(int index);
    // The same device; null before the first `use`.
    std::shared_ptr<DeviceContext> context() const;

    // Any thread.
    const std::shared_ptr<LateFailure>& late_failure() const { return late_failure_; }
    // Operations of all groups that the device has not completed.
    std::size_t under_way() const { return under_way_.load(std::memory_order_seq_cst); }

    // The rest is for the thread that carries out operations.
    void operation_begins() { under_way_.fetch_add(1, std::memory_order_seq_cst); }
    void operation_ends() { under_way_.fetch_sub(1, std::memory_order_seq_cst); }
    LaunchOrder& order() { return order_; }
    void* handle();
    // A second stream, for copies to and from host memory. It never waits for an event, because a copy may block its
    // caller until the stream is idle.
    void* copies();
    // At least `bytes` of pinned ring memory that no other caller uses, for copies of tensors that host memory moves.
    // To pin memory the driver locks each page, so blocks are kept for the next operations. They end with the
    // generation: a rank may still read the data of an aborted operation in the next one. Any thread may drop the
    // result. Throws OutOfMemory.
    std::shared_ptr<PinnedRegion> pinned(const std::shared_ptr<RingMemory>& ring_memory, std::size_t bytes);
    // NCCL launches one operation at a time. False while another owner launches.
    bool claim(const void* owner);
    void release(const void* owner);
    // Takes over a communicator of NCCL, which ends with the stream or is kept for the next generation. Throws Aborted
    // after `abandon`.
    void adopt(std::shared_ptr<NcclCommunicator> communicator);
    // Aborts one communicator, and no other.
    std::shared_ptr<const Reaper> drop(const std::shared_ptr<NcclCommunicator>& communicator);

    // --- the end of a generation by an abort ---
    enum class Kernels {
        Run,
        Ending,  // are being aborted
        Ended,
        Hang,  // nothing ends them
    };
    // Begins to abort all kernels; nothing is launched after this, and no thread calls the communicators any more. Not
    // while another thread carries out operations.
    void abandon();
    // The state of the abort. When it exceeds the abort limit, gives up the devices of this rank.
    Kernels kernels();
    // Gives up the devices where the error lasts.
    void note(const DeviceError& error) const;

   private:
    bool is_idle();
    const Owner owner_;
    const std::shared_ptr<Devices> devices_;
    const std::shared_ptr<LateFailure> late_failure_ = std::make_shared<LateFailure>();
    std::atomic<std::size_t> under_way_{0};
    mutable std::mutex mutex_;
    std::shared_ptr<DeviceContext> context_;
    void* stream_ = nullptr;
    void* copies_ = nullptr;
    std::vector<std::shared_ptr<PinnedRegion>> pinned_;
    LaunchOrder order_;
    std::atomic<const void*> launching_{nullptr};
    std::vector<std::shared_ptr<NcclCommunicator>> communicators_;
    std::shared_ptr<const Reaper> reaper_;
    std::vector<std::shared_ptr<DeviceEvent>> last_;  // one on each stream, behind all that was launched
    std::int64_t limit_ = 0;                          // ns, until which the kernels have to end
};

}  // namespace ring
