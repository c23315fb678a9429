// The copies in ring memory of tensors on a device, where host memory moves their data.
//
// To pin memory the driver locks each page, so blocks are kept for the next operations. They end with the generation:
// in the next one a rank may still read what an aborted operation has left.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/device/device_context.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

// A block of ring memory, pinned for a device where its driver can do that.
class PinnedRegion {
   public:
    PinnedRegion(std::shared_ptr<const DeviceContext> context, std::shared_ptr<Domain> domain, std::size_t bytes)
        : context_(std::move(context)), region_(std::move(domain), bytes), pinned_(context_->pin(data(), bytes)) {}
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

// For the thread that carries out operations; any thread may drop what `take` returns.
class HostCopies {
   public:
    // At least so many bytes, which nobody else has. Throws OutOfMemory.
    std::shared_ptr<PinnedRegion> take(const std::shared_ptr<const DeviceContext>& context,
                                       const std::shared_ptr<Domain>& domain, std::size_t bytes);

   private:
    std::vector<std::shared_ptr<PinnedRegion>> blocks_;
};

}  // namespace ring
