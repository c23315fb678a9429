// Launches operations on devices in the order of tickets, after the work that writes their tensors.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "ring/collectives/device/device_stream.hpp"
#include "ring/collectives/device/device_work.hpp"
#include "ring/collectives/host/algorithm.hpp"
#include "ring/collectives/inter_host/fabric.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {

// The steps that all such operations share; a subclass says what is enqueued. Done when the operation was launched.
class Launch : public Algorithm {
   public:
    explicit Launch(const Operation& operation);
    ~Launch() override;
    Step advance(std::uint64_t gates) final;

   protected:
    // Enqueues the operation on `stream()`, once. Throws DeviceError.
    virtual void enqueue() = 0;
    // Whether the operation was launched; then an event may be recorded on the stream.
    virtual bool launched() { return true; }

    DeviceStream& stream() const { return stream_; }
    DeviceContext& context() const { return *on_device_.context; }
    DeviceWork& on_device() const { return on_device_; }

   private:
    // Between hosts the leaders agree on the greatest ticket that one of them proposes.
    Step take_ticket(std::uint64_t gates);

    struct Numbers {
        std::uint64_t own, theirs;
    };
    HostGroup& group_;
    Fabric* fabric_;
    DeviceStream& stream_;
    DeviceWork& on_device_;
    std::optional<Transfers> transfers_;
    std::shared_ptr<std::deque<Numbers>> landing_;  // of each message
    std::uint64_t greatest_ = 0;                    // of the tickets that are known here
    std::vector<Round> rounds_;                     // empty where each leader sends to each
    std::size_t round_ = 0;
    bool has_ticket_;
};

}  // namespace ring
