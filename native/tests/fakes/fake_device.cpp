#include "fakes/fake_device.hpp"

#include "support.hpp"

namespace ring::test {
namespace {

Devices::Settings settings() {
    Devices::Settings all;
    all.driver = FAKE_CUDA;  // paths, from CMake
    all.nccl = FAKE_NCCL;
    return all;
}

}  // namespace

FakeDevice::FakeDevice(int index)
    : devices_(std::make_shared<Devices>(settings())),
      context_(devices_->context(index)),
      stream_(context_->make_stream()) {}

FakeDevice::~FakeDevice() { context_->destroy_stream(stream_); }

void FakeDevice::write(void* tensor, const void* values, std::size_t bytes) const {
    context_->copy_within(tensor, values, bytes, stream_);
}

void FakeDevice::put(Request& request) const {
    request.device = Device::Cuda;
    request.device_index = context_->index();
    request.stream = stream_;
}

void FakeDevice::finish(Communicator& communicator, Work& work) const {
    communicator.wait_launched(work, 0, nullptr);
    work.get();
    work.hold_back(stream_);
    drain();
    communicator.wait(work, 0, nullptr);
    work.get();
}

void FakeDevice::drain() const {
    const auto last = context_->event_on(stream_);
    wait_for([&] { return last->passed(); }, "the device's stream is idle");
}

}  // namespace ring::test
