// The cards that the ranks of a group exchange before its first operation on devices, and the choice between NCCL and
// host memory that follows from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ring/device/devices.hpp"

namespace ring {

// Exchanged as bytes, in the order of the group, again and again until no rank waits for its NCCL any more.
struct DeviceCard {
    std::uint8_t refuses = 0;  // NCCL, for `reason`
    std::uint8_t insists = 0;  // on NCCL: fails without it
    std::uint8_t waits = 0;    // for NCCL
    std::uint8_t shares = 0;   // its device by NCCL, as NCCL_MULTI_RANK_GPU_ENABLE=1 allows
    std::int32_t index = -1;   // of its device
    std::int32_t nccl = 0;     // version
    char host[64] = {};
    DeviceUuid device;
    NcclId id;    // of the new communicator; the first member's counts
    NcclId kept;  // of the communicator kept from an earlier generation; zero for none
    char reason[512] = {};

    void refuse(const std::string& why);
};

// The reason why the group goes through host memory; empty where NCCL moves its tensors. A pure function of all cards,
// so that all ranks get the same answer. `ranks` are the global ranks of the members.
std::string why_not_nccl(const std::vector<DeviceCard>& cards, const std::vector<int>& ranks);
bool is_zero(const NcclId& id);
// Whether all of them have kept the same communicator.
bool have_kept_one(const std::vector<DeviceCard>& cards);

}  // namespace ring
