// How the ranks of a group agree on what moves tensors on devices, at the first operation that has any.
//
//   cards -> all have kept a communicator? ---------------------------------> NCCL
//     |  \-> NCCL connects -> all have? -> a sum that all know -> all right? -> NCCL
//     \______________________________________________________________ any refusal -> host memory
//
// Each word of it is an allgather of cards in host memory, so all ranks conclude the same. While some rank waits for
// NCCL they show their cards again and again, so that all learn at once that one has refused. Meanwhile the operation
// waits.
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
    // The sum that NCCL may be launching while nobody looks after it any more; null where it launches none.
    std::shared_ptr<DeviceWork> unfinished_launch() const;

   private:
    enum class Stage { Cards, Connecting, Summing, Dropping };
    void write_card();
    void make_id();
    void drop_kept();
    void show_card();
    // What the ranks have said: why there can be no NCCL, or nothing.
    std::string read_cards();
    void refuse(const std::string& why);
    Communicator::Served go_on();
    void connect();
    // True when this rank has nothing left to wait for in the stage.
    bool look();
    void begin_sum();
    bool look_at_sum();
    bool read_sum();
    Communicator::Served give_up(const std::string& why);
    Communicator::Served conclude(const std::string& why);

    Communicator& owner_;
    DeviceGroup& group_;
    const Work& asks_;
    Stage stage_ = Stage::Cards;
    DeviceCard card_;
    std::vector<DeviceCard> cards_;
    std::shared_ptr<Work> meeting_;              // null where the cards have been read
    std::int64_t next_meeting_ = 0, pause_ = 0;  // ns
    std::int64_t deadline_ = 0;
    bool insists_ = false;  // some rank does
    std::shared_ptr<NcclCommunicator> kept_;
    std::string why_;
    std::shared_ptr<const Reaper> reaper_;

    std::shared_ptr<Work> sum_;
    std::shared_ptr<DeviceMemory> terms_;
    std::vector<float> values_;
    std::shared_ptr<DeviceEvent> copied_;
};

}  // namespace ring
