// A device of the fake driver as a rank of a test uses it: with a stream, and tensors that are written on it.
#pragma once

#include <cstddef>
#include <memory>

#include "ring/communicator/communicator.hpp"
#include "ring/device/devices.hpp"

namespace ring::test {

class FakeDevice {
   public:
    explicit FakeDevice(int index);
    // Nothing uses its stream any more.
    ~FakeDevice();
    FakeDevice(const FakeDevice&) = delete;
    FakeDevice& operator=(const FakeDevice&) = delete;

    const std::shared_ptr<Devices>& devices() const { return devices_; }
    // Has the stream write the tensor, as a framework's kernels do.
    void write(void* tensor, const void* values, std::size_t bytes) const;
    // Says that the tensors of the request are written by the stream.
    void put(Request& request) const;
    // Returns when the stream, which waits for the operation once that is launched, sees its results. Throws its error.
    void finish(Communicator& communicator, Work& work) const;
    // Returns when the stream has nothing left to do.
    void drain() const;

   private:
    std::shared_ptr<Devices> devices_;
    std::shared_ptr<DeviceContext> context_;
    void* stream_;
};

}  // namespace ring::test
