// What each rank says before a group's first operation on devices, and what all of them conclude from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ring/device/devices.hpp"

namespace ring {

// Exchanged as bytes, in the order of the group, until no rank has anything left to wait for.
struct DeviceCard {
    std::uint8_t refuses = 0;  // and says why
    std::uint8_t insists = 0;  // on NCCL: fails without
    std::uint8_t waits = 0;    // for NCCL
    std::int32_t index = -1;   // of its device
    std::int32_t nccl = 0;     // version
    char host[64] = {};
    DeviceUuid device;
    NcclId id;    // of the communicator to be; that of the first member counts
    NcclId kept;  // of the communicator that it has from an epoch before; zero for none
    char reason[512] = {};

    void refuse(const std::string& why);
};

// Why the group goes through host memory; empty where NCCL moves its tensors. A pure function of all cards, so that all
// ranks conclude the same. `ranks` are the numbers of the ranks in the whole job.
std::string why_not_nccl(const std::vector<DeviceCard>& cards, const std::vector<int>& ranks);
bool is_zero(const NcclId& id);
// Whether all of them have kept the same communicator.
bool have_kept_one(const std::vector<DeviceCard>& cards);

}  // namespace ring
