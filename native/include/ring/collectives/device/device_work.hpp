// The device side of an operation: the events that it waits for, and the event that others wait for.
#pragma once

#include <memory>
#include <vector>

#include "ring/collectives/device/host_copies.hpp"
#include "ring/collectives/host/algorithm.hpp"
#include "ring/device/device_context.hpp"

namespace ring {

struct DeviceWork {
    std::shared_ptr<DeviceContext> context;
    std::vector<std::shared_ptr<DeviceEvent>> ready;  // the tensors are written
    std::shared_ptr<DeviceEvent> done;                // the results are; null before it is launched
    void* stream = nullptr;                           // of the caller
    bool issued = false;                              // the device may touch the tensors
    std::shared_ptr<DeviceMemory> own;                // its memory where it does not work on the caller's tensors

    // Where host memory moves the data: the tensors themselves, and their copies in ring memory.
    std::vector<Piece> tensors;
    std::shared_ptr<PinnedRegion> copies;
    std::shared_ptr<DeviceEvent> copied;  // the tensors are in those; null before that has begun
};

}  // namespace ring
