// The device side of an operation: the events that it waits for, and the event that others wait for.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/collectives/host/algorithm.hpp"
#include "ring/device/device_context.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

// A block of ring memory, pinned for a device where its driver can do that.
class PinnedRegion {
   public:
    PinnedRegion(std::shared_ptr<const DeviceContext> context, std::shared_ptr<RingMemory> ring_memory,
                 std::size_t bytes)
        : context_(std::move(context)), region_(std::move(ring_memory), bytes), pinned_(context_->pin(data(), bytes)) {}
    ~PinnedRegion() {
        if (pinned_ && owner_.is_this_process()) context_->unpin(data());
    }
    PinnedRegion(const PinnedRegion&) = delete;
    PinnedRegion& operator=(const PinnedRegion&) = delete;

    void* data() const { return region_.data(); }
    std::size_t bytes() const { return region_.bytes(); }

   private:
    const Owner owner_;
    std::shared_ptr<const DeviceContext> context_;
    Region region_;
    bool pinned_;
};

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
    std::shared_ptr<DeviceEvent> copied;  // `copies` has the tensors; null before the copy begins
};

}  // namespace ring
