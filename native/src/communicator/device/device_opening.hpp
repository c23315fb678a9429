// How the ranks of a group agree on what moves tensors on devices, at the first operation that has any.
//
//   cards -> all have kept a communicator? ---------------------------------> NCCL
//     |  \-> NCCL connects -> all have? -> a sum that all know -> all right? -> NCCL
//     \______________________________________________________________ any refusal -> host memory
//
// Each step is an allgather of cards in host memory, so all ranks reach the same conclusion. While a rank waits for
// NCCL they repeat the exchange, so that all learn soon that one has refused. The operation waits meanwhile.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ring/collectives/device/device_card.hpp"
#include "ring/communicator/device_side.hpp"

namespace ring {

class DeviceOpening {
   public:
    DeviceOpening(Communicator& owner, DeviceSide& side, const Work& asks);

    // The operation that waits for the agreement.
    const Work& asks() const { return asks_; }
    // Does what can be done without waiting, when no operation that it has started is under way. Done: the group has
    // agreed. Throws errors that end the generation.
    Communicator::Served advance();
    // The sum that NCCL may still be launching, for the caller to keep; null where there is none.
    std::shared_ptr<DeviceWork> unfinished_launch() const;

   private:
    enum class Stage { Cards, Connecting, Summing, Dropping };
    void write_card();
    void make_id();
    void drop_kept();
    void show_card();
    // The reason against NCCL on the ranks' cards, or empty.
    std::string read_cards();
    void refuse(const std::string& why);
    Communicator::Served go_on();
    void connect();
    // True when this rank has completed the stage.
    bool look();
    void begin_sum();
    bool look_at_sum();
    bool read_sum();
    Communicator::Served give_up(const std::string& why);
    Communicator::Served conclude(const std::string& why);

    Communicator& owner_;
    DeviceSide& side_;
    const Work& asks_;
    Stage stage_ = Stage::Cards;
    DeviceCard card_;
    std::vector<DeviceCard> cards_;
    std::shared_ptr<Work> meeting_;              // the exchange of cards; null when they have been read
    std::int64_t next_meeting_ = 0, pause_ = 0;  // ns
    std::int64_t deadline_ = 0;
    bool insists_ = false;  // some rank insists on NCCL
    std::shared_ptr<NcclCommunicator> kept_;
    std::string why_;
    std::shared_ptr<const Reaper> reaper_;

    std::shared_ptr<Work> sum_;
    std::shared_ptr<DeviceMemory> terms_;
    std::vector<float> values_;
    std::shared_ptr<DeviceEvent> copied_;
};

}  // namespace ring
