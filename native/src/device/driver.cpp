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
    find_function(library, "cuInit", all.cuInit);
    find_function(library, "cuDriverGetVersion", all.cuDriverGetVersion);
    find_function(library, "cuGetErrorString", all.cuGetErrorString);
    find_function(library, "cuDeviceGetCount", all.cuDeviceGetCount);
    find_function(library, "cuDeviceGet", all.cuDeviceGet);
    find_function(library, "cuDeviceGetName", all.cuDeviceGetName);
    find_function(library, "cuDeviceGetUuid_v2", all.cuDeviceGetUuid_v2);
    find_function(library, "cuDevicePrimaryCtxRetain", all.cuDevicePrimaryCtxRetain);
    find_function(library, "cuCtxPushCurrent_v2", all.cuCtxPushCurrent_v2);
    find_function(library, "cuCtxPopCurrent_v2", all.cuCtxPopCurrent_v2);
    find_function(library, "cuStreamCreateWithPriority", all.cuStreamCreateWithPriority);
    find_function(library, "cuStreamDestroy_v2", all.cuStreamDestroy_v2);
    find_function(library, "cuStreamWaitEvent", all.cuStreamWaitEvent);
    find_function(library, "cuStreamIsCapturing", all.cuStreamIsCapturing);
    find_function(library, "cuThreadExchangeStreamCaptureMode", all.cuThreadExchangeStreamCaptureMode);
    find_function(library, "cuEventCreate", all.cuEventCreate);
    find_function(library, "cuEventDestroy_v2", all.cuEventDestroy_v2);
    find_function(library, "cuEventRecord", all.cuEventRecord);
    find_function(library, "cuEventQuery", all.cuEventQuery);
    find_function(library, "cuMemAllocAsync", all.cuMemAllocAsync);
    find_function(library, "cuMemFreeAsync", all.cuMemFreeAsync);
    find_function(library, "cuMemsetD8Async", all.cuMemsetD8Async);
    find_function(library, "cuMemHostRegister_v2", all.cuMemHostRegister_v2);
    find_function(library, "cuMemHostUnregister", all.cuMemHostUnregister);
    find_function(library, "cuMemcpyDtoHAsync_v2", all.cuMemcpyDtoHAsync_v2);
    find_function(library, "cuMemcpyHtoDAsync_v2", all.cuMemcpyHtoDAsync_v2);
    find_function(library, "cuMemcpyDtoDAsync_v2", all.cuMemcpyDtoDAsync_v2);
    all.check(all.cuInit(0), "cuInit");
    return driver;
}

}  // namespace ring
