#include "ring/device/devices.hpp"

#include <cstring>
#include <utility>

#include "ring/device/reaper.hpp"

namespace ring {

Devices::~Devices() {
    if (owner_.is_this_process()) keep({});
}

std::shared_ptr<const Driver> Devices::driver() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!driver_) driver_ = load_driver(settings_.driver);
    return driver_;
}

std::shared_ptr<const Nccl> Devices::nccl() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!nccl_) nccl_ = load_nccl(settings_.nccl, settings_.nccl_otherwise);
    return nccl_;
}

std::shared_ptr<DeviceContext> Devices::context(int index) {
    std::shared_ptr<const Driver> driver = this->driver();
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<DeviceContext>& context = contexts_[index];
    if (!context) context = std::make_shared<DeviceContext>(std::move(driver), index);
    return context;
}

void Devices::keep(std::vector<std::shared_ptr<NcclCommunicator>> communicators) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::swap(kept_, communicators);
    }
    if (!communicators.empty()) Reaper::begin(std::move(communicators), Reaper::Way::Close)->wait();
}

std::shared_ptr<NcclCommunicator> Devices::take(const NcclCommunicator::Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto least = kept_.end();
    for (auto one = kept_.begin(); one != kept_.end(); ++one) {
        if (!((*one)->key() == key)) continue;
        if (least == kept_.end() || std::memcmp(&(*one)->id(), &(*least)->id(), sizeof(NcclId)) < 0) least = one;
    }
    if (least == kept_.end()) return nullptr;
    std::shared_ptr<NcclCommunicator> taken = std::move(*least);
    kept_.erase(least);
    return taken;
}

void Devices::give_up(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (given_up_.empty()) given_up_ = why;
}

std::string Devices::given_up() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return given_up_;
}

}  // namespace ring
