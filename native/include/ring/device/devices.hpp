// The devices of this process: the libraries, a context of each device that was used, and whether a kernel that cannot
// be ended holds one.
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
        std::string nccl_otherwise;  // path of the NCCL to load where none is loaded
        std::string refusal;         // why NCCL must not be used; empty where it may
        bool shares = false;         // NCCL may connect ranks that share a device
        double abort_limit = 5.0;    // seconds after an abort until its kernels count as impossible to end
        double connect_limit = 30.0;
    };

    explicit Devices(Settings settings) : settings_(std::move(settings)) {}
    // Closes the kept communicators.
    ~Devices();
    Devices(const Devices&) = delete;
    Devices& operator=(const Devices&) = delete;

    const Settings& settings() const { return settings_; }
    // Load the library on the first call. Any thread; where that fails, every call throws DeviceError.
    std::shared_ptr<const Driver> driver();
    std::shared_ptr<const Nccl> nccl();
    std::shared_ptr<DeviceContext> context(int index);
    // Keeps the communicators of a generation that ended without an error for the next one, because connecting takes
    // seconds. Closes those kept before that the generation has not taken.
    void keep(std::vector<std::shared_ptr<NcclCommunicator>> communicators);
    // Takes the kept communicator with that key; null where there is none.
    std::shared_ptr<NcclCommunicator> take(const NcclCommunicator::Key& key);
    // From now on this process cannot use its devices, for this reason; the first reason counts.
    void give_up(const std::string& why);
    // That reason; empty while the devices can be used.
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
