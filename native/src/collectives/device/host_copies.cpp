#include "ring/collectives/device/host_copies.hpp"

#include <algorithm>

namespace ring {
namespace {

constexpr std::size_t kLeast = std::size_t{64} << 10;
constexpr std::size_t kKept = std::size_t{512} << 20;  // blocks beyond that end when the next one is taken

bool is_free(const std::shared_ptr<PinnedRegion>& block) { return block.use_count() == 1; }

}  // namespace

std::shared_ptr<PinnedRegion> HostCopies::take(const std::shared_ptr<const DeviceContext>& context,
                                               const std::shared_ptr<Domain>& domain, std::size_t bytes) {
    std::shared_ptr<PinnedRegion> taken;
    std::size_t kept = 0;
    for (const auto& block : blocks_) {
        kept += block->bytes();
        if (is_free(block) && block->bytes() >= bytes && (!taken || block->bytes() < taken->bytes())) taken = block;
    }
    const auto drop = [&](const std::shared_ptr<PinnedRegion>& block) {
        if (kept <= kKept || !is_free(block)) return false;
        kept -= block->bytes();
        return true;
    };
    kept += taken ? 0 : bytes;
    blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(), drop), blocks_.end());
    if (!taken) {
        const std::size_t rounded = round_up(std::max(bytes, kLeast), kLeast);
        blocks_.push_back(taken = std::make_shared<PinnedRegion>(context, domain, rounded));
    }
    return taken;
}

}  // namespace ring
