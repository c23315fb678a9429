// How the ranks of a group agree on what moves tensors on devices, at the first operation that has any.
//
//   cards -> NCCL connects -> connected? -> a sum that all know -> right? -> NCCL
//     \______________________/ any refusal _____________________/------> host memory
//
// Each word of it is an allgather in host memory, so all ranks conclude the same. Meanwhile the operation waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ring/collectives/device/device_card.hpp"
#include "ring/collectives/device/device_group.hpp"
#include "ring/communicator/communicator.hpp"

namespace ring {

class DeviceOpening {
   public:
    DeviceOpening(Communicator& owner, DeviceGroup& group, const Work& asks);

    // The operation that waits for the agreement.
    const Work& asks() const { return asks_; }
    // Does what can be done without waiting, when nothing that it has asked for is under way. Done: the group knows its
    // way. Throws what ends the epoch.
    Communicator::Served advance();

   private:
    enum class Stage { Cards, Connecting, Connected, Summing, Copying, Dropping, Checked };
    void ask(Stage stage);
    std::string answer();
    void begin_sum();
    void read_sum();
    bool wait_for_nccl();
    void refuse(const std::string& why);
    Communicator::Served conclude(const std::string& why);

    Communicator& owner_;
    DeviceGroup& group_;
    const Work& asks_;
    Stage stage_ = Stage::Cards;
    DeviceCard card_;
    std::vector<DeviceCard> cards_;
    std::shared_ptr<Work> meeting_;
    std::int64_t deadline_ = 0;
    bool insists_ = false;  // some rank does
    std::shared_ptr<const Reaper> reaper_;

    std::shared_ptr<Work> sum_;
    std::shared_ptr<DeviceMemory> terms_;
    std::vector<float> values_;
    std::shared_ptr<DeviceEvent> copied_;
};

}  // namespace ring
