// A device of the fake driver for a rank of a test, with a stream on which tensors are written.
#pragma once

#include <cstddef>
#include <memory>

#include "ring/communicator/communicator.hpp"
#include "ring/device/devices.hpp"

namespace ring::test {

class FakeDevice {
   public:
    explicit FakeDevice(int index);
    // Call it when nothing uses the stream any more.
    ~FakeDevice();
    FakeDevice(const FakeDevice&) = delete;
    FakeDevice& operator=(const FakeDevice&) = delete;

    const std::shared_ptr<Devices>& devices() const { return devices_; }
    // Queues a write of the tensor on the stream, as a framework's kernels do.
    void write(void* tensor, const void* values, std::size_t bytes) const;
    // Sets the device and stream of the request.
    void put(Request& request) const;
    // Makes the stream wait for the launched operation, and returns when the stream has its results. Throws its error.
    void finish(Communicator& communicator, Work& work) const;
    // Returns when the stream is idle.
    void drain() const;

   private:
    std::shared_ptr<Devices> devices_;
    std::shared_ptr<DeviceContext> context_;
    void* stream_;
};

}  // namespace ring::test
