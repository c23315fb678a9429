#include "ring/device/driver.hpp"

#include <algorithm>
#include <iterator>

#include "ring/device/library.hpp"

namespace ring {
namespace {

// Errors after which, by the driver's documentation, a process must end to use CUDA again; and 4, which means that the
// driver has shut down.
constexpr int kLasting[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};

}  // namespace

void Driver::check(int result, const char* call) const {
    if (result == 0) return;
    const char* words = nullptr;
    cuGetErrorString(result, &words);
    throw DeviceError(std::string(call) + ": " + (words != nullptr ? words : "unknown error") + " (CUDA error " +
                          std::to_string(result) + ")",
                      std::find(std::begin(kLasting), std::end(kLasting), result) != std::end(kLasting));
}

std::shared_ptr<const Driver> load_driver(const std::string& path) {
    void* library = open_library("libcuda.so.1", path);
    auto driver = std::make_shared<Driver>();
    Driver& all = *driver;
#define RING_FIND(result, name, parameters) find_function(library, #name, all.name);
    RING_CUDA_FUNCTIONS(RING_FIND)
#undef RING_FIND
    all.check(all.cuInit(0), "cuInit");
    return driver;
}

}  // namespace ring
