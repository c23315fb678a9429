// What the ranks of one group have agreed on for tensors on devices: NCCL or host memory.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "ring/collectives/device/device_stream.hpp"

namespace ring {

class DeviceGroup {
   public:
    enum class Way {
        Unknown,  // the ranks have not agreed yet
        Nccl,
        Host,   // through host memory, for `reason`
        Error,  // some rank insists on NCCL, which cannot be used for `reason`
    };

    explicit DeviceGroup(std::shared_ptr<DeviceStream> stream, Way way) : stream_(std::move(stream)), way_(way) {}

    DeviceStream& stream() const { return *stream_; }
    const std::shared_ptr<DeviceStream>& shared_stream() const { return stream_; }
    Way way() const { return way_; }
    const std::string& reason() const { return reason_; }
    // Null in a group of one rank.
    NcclCommunicator* nccl() const { return nccl_.get(); }

    void connect(const NcclId& id, NcclCommunicator::Key key, int index) {
        const DeviceContext::Current current(*stream_->context());  // which NCCL makes it for
        auto nccl = std::make_shared<NcclCommunicator>(stream_->devices().nccl(), id, std::move(key), index);
        stream_->adopt(nccl);
        nccl_ = std::move(nccl);
    }
    // Takes one that the stream has adopted.
    void reuse(std::shared_ptr<NcclCommunicator> nccl) { nccl_ = std::move(nccl); }
    void conclude(Way way, std::string reason) {
        way_ = way;
        reason_ = std::move(reason);
    }
    // Gives the communicator up; null where there is none.
    std::shared_ptr<const Reaper> disconnect() {
        const std::shared_ptr<NcclCommunicator> nccl = std::move(nccl_);
        return nccl ? stream_->drop(nccl) : nullptr;
    }

   private:
    std::shared_ptr<DeviceStream> stream_;
    std::shared_ptr<NcclCommunicator> nccl_;
    Way way_;
    std::string reason_;
};

}  // namespace ring
