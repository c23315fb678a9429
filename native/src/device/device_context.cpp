#include "ring/device/device_context.hpp"

#include <limits>
#include <utility>

namespace ring {
namespace {

constexpr unsigned kNonBlocking = 1;    // of a stream: it does not wait for the default stream
constexpr unsigned kWithoutTiming = 2;  // of an event
constexpr int kRelaxed = 2;             // capture mode of a thread, while other threads capture graphs
constexpr int kHighestPriority = std::numeric_limits<int>::min();  // the driver takes the nearest one that it has

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

DeviceEvent::DeviceEvent(std::shared_ptr<DeviceContext> context)
    : context_(std::move(context)), handle_(context_->take_event()) {}

DeviceEvent::~DeviceEvent() { context_->give_back(handle_); }

void DeviceEvent::record(void* stream) {
    const DeviceContext::Current current(*context_);
    context_->driver().check(context_->driver().cuEventRecord(handle_, stream), "cuEventRecord");
}

void DeviceEvent::hold_back(void* stream) const {
    const DeviceContext::Current current(*context_);
    context_->driver().check(context_->driver().cuStreamWaitEvent(stream, handle_, 0), "cuStreamWaitEvent");
}

bool DeviceEvent::passed() const {
    const DeviceContext::Current current(*context_);
    const int result = context_->driver().cuEventQuery(handle_);
    if (result == Driver::kNotReady) return false;
    context_->driver().check(result, "cuEventQuery");
    return true;
}

DeviceMemory::DeviceMemory(std::shared_ptr<DeviceContext> context, std::size_t bytes, void* stream, void* last)
    : context_(std::move(context)), bytes_(bytes), last_(last) {
    if (bytes == 0) return;
    const DeviceContext::Current current(*context_);
    context_->driver().check(context_->driver().cuMemAllocAsync(&address_, bytes, stream), "cuMemAllocAsync");
}

DeviceMemory::~DeviceMemory() {
    if (address_ == 0) return;
    try {
        const DeviceContext::Current current(*context_);
        context_->driver().cuMemFreeAsync(address_, last_);
    } catch (const DeviceError&) {  // the driver has shut down with its memory
    }
}

DeviceContext::Current::Current(const DeviceContext& context) : driver_(*context.driver_), mode_(kRelaxed) {
    driver_.check(driver_.cuCtxPushCurrent_v2(context.context_), "cuCtxPushCurrent");
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
}

DeviceContext::Current::~Current() {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
    void* context = nullptr;
    driver_.cuCtxPopCurrent_v2(&context);
}

DeviceContext::DeviceContext(std::shared_ptr<const Driver> driver, int index)
    : driver_(std::move(driver)), index_(index) {
    driver_->check(driver_->cuDeviceGet(&device_, index), "cuDeviceGet");
    driver_->check(driver_->cuDeviceGetUuid_v2(&uuid_, device_), "cuDeviceGetUuid");
    // Never released: torch holds it too, and kernels of a generation may outlive the generation.
    driver_->check(driver_->cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

DeviceContext::~DeviceContext() {
    try {
        const Current current(*this);
        for (void* event : spare_) driver_->cuEventDestroy_v2(event);
    } catch (const DeviceError&) {
    }
}

std::string DeviceContext::name() const {
    char text[96] = {};
    driver_->check(driver_->cuDeviceGetName(text, sizeof text, device_), "cuDeviceGetName");
    return text;
}

void* DeviceContext::make_stream() const {
    const Current current(*this);
    void* stream = nullptr;
    driver_->check(driver_->cuStreamCreateWithPriority(&stream, kNonBlocking, kHighestPriority),
                   "cuStreamCreateWithPriority");
    return stream;
}

void DeviceContext::destroy_stream(void* stream) const noexcept {
    try {
        const Current current(*this);
        driver_->cuStreamDestroy_v2(stream);
    } catch (const DeviceError&) {
    }
}

bool DeviceContext::is_capturing(void* stream) const {
    const Current current(*this);
    int status = 0;
    const int result = driver_->cuStreamIsCapturing(stream, &status);
    if (result == Driver::kCaptureImplicit) return true;
    driver_->check(result, "cuStreamIsCapturing");
    return status != 0;
}

std::shared_ptr<DeviceEvent> DeviceContext::event_on(void* stream) {
    auto event = std::make_shared<DeviceEvent>(shared_from_this());
    event->record(stream);
    return event;
}

bool DeviceContext::pin(void* memory, std::size_t bytes) const noexcept {
    try {
        const Current current(*this);
        return driver_->cuMemHostRegister_v2(memory, bytes, 0) == 0;
    } catch (const DeviceError&) {
        return false;
    }
}

void DeviceContext::unpin(void* memory) const noexcept {
    try {
        const Current current(*this);
        driver_->cuMemHostUnregister(memory);
    } catch (const DeviceError&) {  // the driver has shut down
    }
}

void DeviceContext::copy_to_host(void* to, const void* from, std::size_t bytes, void* stream) const {
    if (bytes == 0) return;
    const Current current(*this);
    driver_->check(driver_->cuMemcpyDtoHAsync_v2(to, address(from), bytes, stream), "cuMemcpyDtoHAsync");
}

void DeviceContext::copy_to_device(void* to, const void* from, std::size_t bytes, void* stream) const {
    if (bytes == 0) return;
    const Current current(*this);
    driver_->check(driver_->cuMemcpyHtoDAsync_v2(address(to), from, bytes, stream), "cuMemcpyHtoDAsync");
}

void DeviceContext::copy_within(void* to, const void* from, std::size_t bytes, void* stream) const {
    if (bytes == 0) return;
    const Current current(*this);
    driver_->check(driver_->cuMemcpyDtoDAsync_v2(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void* DeviceContext::take_event() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!spare_.empty()) {
            void* event = spare_.back();
            spare_.pop_back();
            return event;
        }
    }
    const Current current(*this);
    void* event = nullptr;
    driver_->check(driver_->cuEventCreate(&event, kWithoutTiming), "cuEventCreate");
    return event;
}

void DeviceContext::give_back(void* event) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
        spare_.push_back(event);
    } catch (...) {  // no memory: the event is lost
    }
}

}  // namespace ring
