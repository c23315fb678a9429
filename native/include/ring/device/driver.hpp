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

// Its functions, under the names that the library exports: X(result, name, parameters). Each returns 0 or an error.
// cuDeviceGetUuid_v2 gives the UUID of the MIG instance, where there is one.
#define RING_CUDA_FUNCTIONS(X)                                                     \
    X(int, cuInit, (unsigned))                                                     \
    X(int, cuDriverGetVersion, (int*))                                             \
    X(int, cuGetErrorString, (int, const char**))                                  \
    X(int, cuDeviceGetCount, (int*))                                               \
    X(int, cuDeviceGet, (int*, int))                                               \
    X(int, cuDeviceGetName, (char*, int, int))                                     \
    X(int, cuDeviceGetUuid_v2, (DeviceUuid*, int))                                 \
    X(int, cuDevicePrimaryCtxRetain, (void**, int))                                \
    X(int, cuCtxPushCurrent_v2, (void*))                                           \
    X(int, cuCtxPopCurrent_v2, (void**))                                           \
    X(int, cuStreamCreateWithPriority, (void**, unsigned, int))                    \
    X(int, cuStreamDestroy_v2, (void*))                                            \
    X(int, cuStreamWaitEvent, (void*, void*, unsigned))                            \
    X(int, cuStreamIsCapturing, (void*, int*))                                     \
    X(int, cuThreadExchangeStreamCaptureMode, (int*))                              \
    X(int, cuEventCreate, (void**, unsigned))                                      \
    X(int, cuEventDestroy_v2, (void*))                                             \
    X(int, cuEventRecord, (void*, void*))                                          \
    X(int, cuEventQuery, (void*))                                                  \
    X(int, cuMemAllocAsync, (std::uint64_t*, std::size_t, void*))                  \
    X(int, cuMemFreeAsync, (std::uint64_t, void*))                                 \
    X(int, cuMemsetD8Async, (std::uint64_t, unsigned char, std::size_t, void*))    \
    X(int, cuMemHostRegister_v2, (void*, std::size_t, unsigned))                   \
    X(int, cuMemHostUnregister, (void*))                                           \
    X(int, cuMemcpyDtoHAsync_v2, (void*, std::uint64_t, std::size_t, void*))       \
    X(int, cuMemcpyHtoDAsync_v2, (std::uint64_t, const void*, std::size_t, void*)) \
    X(int, cuMemcpyDtoDAsync_v2, (std::uint64_t, std::uint64_t, std::size_t, void*))
#define RING_POINTER(result, name, parameters) result(*name) parameters = nullptr;

struct Driver {
    RING_CUDA_FUNCTIONS(RING_POINTER)

    // Throws DeviceError with the driver's text where `result` is an error; `call` is the function's name.
    void check(int result, const char* call) const;

    static constexpr int kNotReady = 600;         // of cuEventQuery
    static constexpr int kCaptureImplicit = 906;  // of the default stream, while another one is captured
};

// The functions of the driver at `path`, or of the system's where that is empty. Throws DeviceError. The library is
// never unloaded: its threads and contexts belong to the whole process.
std::shared_ptr<const Driver> load_driver(const std::string& path);

}  // namespace ring
