// The CUDA driver API, found at run time: one ABI for CUDA 12 and 13, and no header of either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ring/base/errors.hpp"

namespace ring {

// An error of the driver or of NCCL, or that a library cannot be loaded.
struct DeviceError : Error {
    explicit DeviceError(const std::string& text, bool lasting = false) : Error(text), lasts(lasting) {}
    bool lasts;  // a kernel has faulted, and this process cannot use the device any more
};

struct DeviceUuid {
    unsigned char bytes[16] = {};
};

// Its functions, under the names that the library exports; each returns 0 or an error.
struct Driver {
    int (*cuInit)(unsigned) = nullptr;
    int (*cuDriverGetVersion)(int*) = nullptr;
    int (*cuGetErrorString)(int, const char**) = nullptr;
    int (*cuDeviceGetCount)(int*) = nullptr;
    int (*cuDeviceGet)(int*, int) = nullptr;
    int (*cuDeviceGetName)(char*, int, int) = nullptr;
    int (*cuDeviceGetUuid_v2)(DeviceUuid*, int) = nullptr;  // the UUID of the MIG instance, where there is one
    int (*cuDevicePrimaryCtxRetain)(void**, int) = nullptr;
    int (*cuCtxPushCurrent_v2)(void*) = nullptr;
    int (*cuCtxPopCurrent_v2)(void**) = nullptr;
    int (*cuStreamCreateWithPriority)(void**, unsigned, int) = nullptr;
    int (*cuStreamDestroy_v2)(void*) = nullptr;
    int (*cuStreamWaitEvent)(void*, void*, unsigned) = nullptr;
    int (*cuStreamIsCapturing)(void*, int*) = nullptr;
    int (*cuThreadExchangeStreamCaptureMode)(int*) = nullptr;
    int (*cuEventCreate)(void**, unsigned) = nullptr;
    int (*cuEventDestroy_v2)(void*) = nullptr;
    int (*cuEventRecord)(void*, void*) = nullptr;
    int (*cuEventQuery)(void*) = nullptr;
    int (*cuMemAllocAsync)(std::uint64_t*, std::size_t, void*) = nullptr;
    int (*cuMemFreeAsync)(std::uint64_t, void*) = nullptr;
    int (*cuMemsetD8Async)(std::uint64_t, unsigned char, std::size_t, void*) = nullptr;
    int (*cuMemHostRegister_v2)(void*, std::size_t, unsigned) = nullptr;
    int (*cuMemHostUnregister)(void*) = nullptr;
    int (*cuMemcpyDtoHAsync_v2)(void*, std::uint64_t, std::size_t, void*) = nullptr;
    int (*cuMemcpyHtoDAsync_v2)(std::uint64_t, const void*, std::size_t, void*) = nullptr;
    int (*cuMemcpyDtoDAsync_v2)(std::uint64_t, std::uint64_t, std::size_t, void*) = nullptr;

    // Throws DeviceError with the driver's text where `result` is an error; `call` is the function's name.
    void check(int result, const char* call) const;

    static constexpr int kNotReady = 600;         // of cuEventQuery
    static constexpr int kCaptureImplicit = 906;  // of the default stream, while another one is captured
};

// The functions of the driver at `path`, or of the system's where that is empty. Throws DeviceError. The library is
// never unloaded: its threads and contexts belong to the whole process.
std::shared_ptr<const Driver> load_driver(const std::string& path);

}  // namespace ring
