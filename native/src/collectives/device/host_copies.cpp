#include "ring/collectives/device/host_copies.hpp"

#include <algorithm>

namespace ring {
namespace {

constexpr std::size_t kLeast = std::size_t{64} << 10;

bool is_free(const std::shared_ptr<PinnedRegion>& block) { return block.use_count() == 1; }

}  // namespace

std::shared_ptr<PinnedRegion> HostCopies::take(const std::shared_ptr<const DeviceContext>& context,
                                               const std::shared_ptr<Domain>& domain, std::size_t bytes) {
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block)
        if (is_free(*block) && (*block)->bytes() >= bytes &&
            (best == blocks_.end() || (*block)->bytes() < (*best)->bytes()))
            best = block;
    if (best != blocks_.end()) {
        std::rotate(best, best + 1, blocks_.end());
        return blocks_.back();
    }
    std::size_t kept = 0;
    for (const auto& block : blocks_) kept += block->bytes();
    for (auto block = blocks_.begin(); block != blocks_.end() && kept + bytes > kReserve;) {
        if (!is_free(*block)) {
            ++block;
            continue;
        }
        kept -= (*block)->bytes();
        block = blocks_.erase(block);
    }
    blocks_.push_back(std::make_shared<PinnedRegion>(context, domain, round_up(std::max(bytes, kLeast), kLeast)));
    return blocks_.back();
}

}  // namespace ring
