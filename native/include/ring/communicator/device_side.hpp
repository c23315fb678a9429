// What a communicator does for tensors on devices: what its ranks agree on, copies where host memory moves the data,
// and operations that have been launched.
//
//   caller            progress thread                                              device
//   ready, enqueue -> header, gate -> ticket, launch ----------------------------> kernel
//   <- launched: its stream waits for `done`                                       done
//                     <- done: the tensors are free, errors are known ------------
//
// An operation of a group passes its gate before anything is launched, so mismatches, interruptions and missing ranks
// are found while no kernel waits. What is launched is looked at until it is done, and is aborted with the epoch.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ring/collectives/device/device_group.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring {

class DeviceOpening;

class DeviceSide {
   public:
    DeviceSide(Communicator& owner, std::shared_ptr<DeviceStream> stream);
    // Aborts what is under way, and returns when no kernel of it runs or nothing ends one.
    ~DeviceSide();
    DeviceSide(const DeviceSide&) = delete;
    DeviceSide& operator=(const DeviceSide&) = delete;

    // By the caller, for a work that has tensors on a device: remembers what has been written on its stream so far.
    void prepare(Work& work) const;
    // Any thread.
    bool is_quiet() const { return under_way_.load(std::memory_order_seq_cst) == 0; }
    std::pair<std::string, std::string> transport() const;

    // The rest is for the thread that carries operations out.
    using Served = Communicator::Served;
    // Before an operation begins: copies its tensors to host memory, where that moves them. False until they are there.
    bool fetch(Work& work);
    // After it has posted its header at that gate.
    void posted(const Work& work);
    // Whether the ranks have yet to agree on what moves its tensors, which the headers show to be on devices; then it
    // begins again after `agree`.
    bool must_agree(const std::vector<Header>& headers) const;
    void agree(Work& work);
    bool is_agreeing(const Work& work) const;
    Served serve_agreement();
    // What the algorithm of that path works with. Throws Unsupported.
    void take_part(Work& work, Operation& operation, const Path& path);
    // The operation is launched, or its results are in host memory: hands it to the device.
    void launch(const std::shared_ptr<Work>& work);
    // A joined rank has none in what the others call.
    void take_no_part();
    // A joined rank's part has been launched; its join is not over.
    void launch_for_joined(Work& work);
    // It has failed. True where a kernel may touch its tensors: then it ends when none does.
    bool fail(const std::shared_ptr<Work>& work, const std::exception_ptr& error);
    // Has `other` end when `work`, which has been launched, does.
    void follow(const Work& work, const std::shared_ptr<Work>& other);
    // Looks at what has been launched.
    Served serve();

    DeviceGroup& group() { return group_; }

   private:
    struct Flight {
        std::vector<std::shared_ptr<Work>> works;  // none: a joined rank's part
        std::shared_ptr<DeviceWork> device;
        std::exception_ptr error;
        std::int64_t deadline = 0;
    };
    bool through_host(const Work& work) const;
    void bring_back(Work& work);
    void fly(Flight flight);
    void check_flights();
    void land(Flight& flight, std::exception_ptr error, bool must_keep) noexcept;
    // A flight is none any more.
    void touch_down();
    void abort(const std::exception_ptr& error) noexcept;

    Communicator& owner_;
    DeviceGroup group_;
    std::unique_ptr<DeviceOpening> opening_;
    std::deque<Flight> flights_;
    std::atomic<std::size_t> under_way_{0};
    std::int64_t next_check_ = 0;
    std::exception_ptr error_;  // of the abort that is under way
    mutable std::mutex mutex_;
    std::pair<std::string, std::string> transport_;
};

}  // namespace ring
