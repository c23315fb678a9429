// The devices of this rank, for as long as its process lives: the libraries, a context of each device that was used,
// and whether one is held by a kernel that nothing ends.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/device/device_context.hpp"
#include "ring/device/nccl.hpp"

namespace ring {

// RING_DEVICE
enum class DeviceChoice { Auto, Nccl, Host };

class Devices {
   public:
    struct Settings {
        DeviceChoice choice = DeviceChoice::Auto;
        std::string driver;          // path of the driver; empty: the system's
        std::string nccl;            // path of NCCL; empty: the one that is loaded
        std::string nccl_otherwise;  // path of one for where none is loaded
        std::string refusal;         // why NCCL must not be used; empty where it may
        double abort_limit = 5.0;    // seconds until kernels that an abort does not end count as never ending
        double connect_limit = 30.0;
    };

    explicit Devices(Settings settings) : settings_(std::move(settings)) {}
    // Closes what is kept.
    ~Devices();
    Devices(const Devices&) = delete;
    Devices& operator=(const Devices&) = delete;

    const Settings& settings() const { return settings_; }
    // Both are loaded when they are first asked for. Any thread; throws DeviceError at every call.
    std::shared_ptr<const Driver> driver();
    std::shared_ptr<const Nccl> nccl();
    std::shared_ptr<DeviceContext> context(int index);
    // Keeps communicators of an epoch that has ended well for the next one: to connect takes seconds. Those that were
    // kept before, and that the epoch has not taken, are closed.
    void keep(std::vector<std::shared_ptr<NcclCommunicator>> communicators);
    // One that was kept, the same on all ranks that have kept the same; null where there is none.
    std::shared_ptr<NcclCommunicator> take(const NcclCommunicator::Key& key);
    // From here on this process cannot use its devices, and says why; the first reason counts.
    void give_up(const std::string& why);
    // Empty while it can.
    std::string given_up() const;

   private:
    const Owner owner_;
    const Settings settings_;
    mutable std::mutex mutex_;
    std::shared_ptr<const Driver> driver_;
    std::shared_ptr<const Nccl> nccl_;
    std::map<int, std::shared_ptr<DeviceContext>> contexts_;
    std::vector<std::shared_ptr<NcclCommunicator>> kept_;
    std::string given_up_;
};

}  // namespace ring
