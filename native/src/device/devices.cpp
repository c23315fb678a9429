#include "ring/device/devices.hpp"

namespace ring {

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

void Devices::give_up(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (given_up_.empty()) given_up_ = why;
}

std::string Devices::given_up() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return given_up_;
}

}  // namespace ring
