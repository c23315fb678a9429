// A CUDA driver without a device, for tests: device memory is host memory, a stream is a thread that carries out what
// is enqueued in order, an event is a point in its work.
//
// It holds its callers to the rules: a call without a current context, a handle that it never gave, and memory that is
// freed twice end the process with a message.
//
// While a stream is captured in the global mode, what may not be called fails and spoils the graph, in any thread that
// has not said that it knows what it does (cuThreadExchangeStreamCaptureMode).
//
// Settings, by fake_cuda_set(name, value) or FAKE_CUDA_NAME in the environment:
//   no_init    the error that cuInit gives (0)
//   devices    how many there are (8)
//   fault      an error that a kernel has left behind: calls that report those give it (0)
//   delay_us   most that an operation of a stream is late, at random (0)
//   same_uuid  every device has the same one (0)
//   reaches    the device reaches host memory by itself: copies to it outlive their call, as those to pinned memory do
//   (0) no_pinning host memory cannot be pinned (0)
#include <iterator>

#include "fake_streams.hpp"

namespace {

struct Pinned {
    std::size_t bytes;
    std::atomic<int> copies{0};  // under way
};
std::mutex pinned_mutex;
std::map<const void*, std::shared_ptr<Pinned>>& pinned() {
    static auto* all = new std::map<const void*, std::shared_ptr<Pinned>>;
    return *all;
}
// The pinned memory that all of this lies in; null where it lies in none.
std::shared_ptr<Pinned> pinned_at(const void* memory, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    const auto next = pinned().upper_bound(memory);
    if (next == pinned().begin()) return nullptr;
    const auto& [begin, block] = *std::prev(next);
    const bool inside = static_cast<const char*>(memory) + bytes <= static_cast<const char*>(begin) + block->bytes;
    return inside ? block : nullptr;
}
// Queues a copy from or to pinned memory.
void copy_pinned(const std::shared_ptr<Pinned>& block, void* to, const void* from, std::size_t bytes, void* stream) {
    ++block->copies;
    stream_of(stream)->enqueue([=] {
        std::memcpy(to, from, bytes);
        --block->copies;
    });
}

}  // namespace

extern "C" {

// --- for the fake NCCL and for tests ---

void fake_cuda_set(const char* name, long value) {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    settings().values[name] = value;
}

void fake_cuda_enqueue(void* stream, std::function<void()>* work) { stream_of(stream)->enqueue(std::move(*work)); }

// Copies from and to pinned memory that have not ended.
long fake_cuda_copies() {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    long copies = 0;
    for (const auto& [begin, block] : pinned()) copies += block->copies;
    return copies;
}

// A kernel: after so many microseconds it fills floats.
void fake_cuda_fill(void* stream, float* to, long count, float value, long microseconds) {
    stream_of(stream)->enqueue([=] {
        usleep(static_cast<useconds_t>(microseconds));
        for (long i = 0; i < count; ++i) to[i] = value;
    });
}

// A kernel that copies bytes, as a framework's reading of a tensor does.
void fake_cuda_copy(void* stream, void* to, const void* from, long bytes) {
    stream_of(stream)->enqueue([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
}

// A kernel that runs until *over.
void fake_cuda_hold(void* stream, const std::atomic<int>* over) {
    stream_of(stream)->enqueue([over] {
        while (over->load() == 0) usleep(200);
    });
}

// Begins or ends a graph; `globally` as cudaStreamCaptureModeGlobal. Whether the graph that ends is a good one.
int fake_cuda_capture(void* stream, int on, int globally) {
    const std::shared_ptr<Stream> one = stream_of(stream);
    const std::lock_guard<std::mutex> lock(world().mutex);
    one->capturing = on != 0;
    one->globally = globally != 0;
    return std::exchange(one->spoilt, false) ? 0 : 1;
}

// As cudaGetDevice: a thread without a context is on the first device.
int fake_cuda_current_device() { return contexts.empty() ? 0 : contexts.back(); }

int fake_cuda_device_of(void* stream) { return stream_of(stream)->device; }

// Waits as cuStreamSynchronize does.
void fake_cuda_synchronize(void* stream) {
    const std::shared_ptr<Stream> one = stream_of(stream);
    std::unique_lock<std::mutex> lock(one->mutex);
    one->changed.wait(lock, [&] { return one->queue.empty() && !one->busy; });
}

// Bytes that cuMemAllocAsync has given and that have not been freed.
long fake_cuda_allocated() {
    World& all = world();
    const std::lock_guard<std::mutex> lock(all.mutex);
    long bytes = 0;
    for (const auto& one : all.memory) bytes += static_cast<long>(one.second);
    return bytes;
}

// --- the driver ---

int cuInit(unsigned) { return static_cast<int>(settings().get("no_init", 0)); }
int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}
int cuGetErrorString(int error, const char** text) {
    *text = error == kInvalidContext   ? "invalid device context"
            : error == kInvalidValue   ? "invalid argument"
            : error == kIllegalAddress ? "an illegal memory access was encountered"
            : error == kCapturing      ? "operation not permitted when stream is capturing"
                                       : "error";
    return 0;
}
int cuDeviceGetCount(int* count) {
    *count = static_cast<int>(settings().get("devices", 8));
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= settings().get("devices", 8) || ordinal >= kMostDevices) return kInvalidValue;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char* name, int length, int) {
    std::snprintf(name, static_cast<std::size_t>(length), "Fake device");
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    std::memset(uuid, 0, 16);
    if (settings().get("same_uuid", 0) != 0) return 0;
    const int pid = getpid();  // a process has devices of its own
    std::memcpy(uuid, &pid, sizeof pid);
    std::memcpy(uuid + 8, &device, sizeof device);
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
    return 0;
}
int cuCtxPushCurrent_v2(void* context) {
    contexts.push_back(device_of(context));
    return 0;
}
int cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return kInvalidContext;
    *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(contexts.back()) + 1);
    contexts.pop_back();
    return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
    if (contexts.empty()) return kInvalidContext;
    const std::shared_ptr<Stream> made = make_stream(contexts.back());
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().streams[made.get()] = made;
    *stream = made.get();
    return 0;
}
int cuStreamDestroy_v2(void* handle) {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    {
        const std::lock_guard<std::mutex> lock(world().mutex);
        world().streams.erase(handle);
    }
    {
        const std::lock_guard<std::mutex> lock(stream->mutex);
        stream->ended = true;
    }
    stream->changed.notify_all();
    return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
    const std::shared_ptr<Stream> one = stream_of(stream);
    if (one == nullptr) return kInvalidContext;
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (stream == nullptr)
        for (const auto& other : world().streams)
            if (other.second->capturing) return kCaptureImplied;
    *status = one->capturing ? 1 : 0;
    return fault();
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return 0;
}
int cuStreamSynchronize(void* stream) {
    if (stream_of(stream) == nullptr) return kInvalidContext;
    fake_cuda_synchronize(stream);
    return 0;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    if (stream_of(stream) == nullptr) return kInvalidContext;
    stream_of(stream)->enqueue([=] { function(data); });
    return 0;
}
int cuEventCreate(void** event, unsigned) {
    if (contexts.empty()) return kInvalidContext;
    const auto made = std::make_shared<Event>();
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().events[made.get()] = made;
    *event = made.get();
    return 0;
}
int cuEventDestroy_v2(void* event) {
    event_of(event);
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().events.erase(event);  // a stream may still pass it
    return 0;
}
int cuEventRecord(void* handle, void* stream) {
    const std::shared_ptr<Event> event = event_of(handle);
    const std::shared_ptr<Stream> one = stream_of(stream);
    if (one == nullptr) return kInvalidContext;
    if (fault() != 0) return fault();
    unsigned long number = 0;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        number = ++event->recorded;
    }
    one->enqueue([event, number] {
        {
            const std::lock_guard<std::mutex> lock(event->mutex);
            if (event->passed < number) event->passed = number;
        }
        event->changed.notify_all();
    });
    return 0;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    const std::shared_ptr<Event> event = event_of(handle);
    const std::shared_ptr<Stream> one = stream_of(stream);
    if (one == nullptr) return kInvalidContext;
    unsigned long number = 0;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        number = event->recorded;
    }
    one->enqueue([event, number] {
        std::unique_lock<std::mutex> lock(event->mutex);
        event->changed.wait(lock, [&] { return event->passed >= number; });
    });
    return 0;
}
int cuEventQuery(void* handle) {
    const std::shared_ptr<Event> event = event_of(handle);
    if (const int error = unsafe(); error != 0) return error;
    const std::lock_guard<std::mutex> lock(event->mutex);
    return event->passed >= event->recorded ? 0 : kNotReady;
}
int cuMemAllocAsync(std::uint64_t* address, std::size_t bytes, void* stream) {
    if (stream_of(stream) == nullptr) return kInvalidContext;
    if (const int error = unsafe(); error != 0) return error;
    void* memory = std::malloc(bytes);
    std::memset(memory, 0xff, bytes);  // NaN, for those who read what nobody has written
    *address = reinterpret_cast<std::uintptr_t>(memory);
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().memory[*address] = bytes;
    return 0;
}
int cuMemFreeAsync(std::uint64_t address, void* stream) {
    if (stream_of(stream) == nullptr) return kInvalidContext;
    {
        const std::lock_guard<std::mutex> lock(world().mutex);
        if (world().memory.erase(address) == 0) broken("memory is freed that was not allocated");
    }
    stream_of(stream)->enqueue([address] { std::free(reinterpret_cast<void*>(address)); });
    return 0;
}
int cuMemsetD8Async(std::uint64_t to, unsigned char value, std::size_t bytes, void* stream) {
    stream_of(stream)->enqueue([=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
    return 0;
}
// Host memory is never pinned here: as a rule the call returns when the copy is done, as the driver's does.
int cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
    if (settings().get("no_pinning", 0) != 0) return 801;
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned()[memory] = std::make_shared<Pinned>();
    pinned()[memory]->bytes = bytes;
    return 0;
}
int cuMemHostUnregister(void* memory) {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    const auto found = pinned().find(memory);
    if (found == pinned().end()) return 713;
    if (found->second->copies != 0) broken("memory is unpinned while the device copies");
    pinned().erase(found);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, void* stream) {
    if (const int error = unsafe(); error != 0) return error;
    const void* source = reinterpret_cast<const void*>(from);
    if (const auto block = pinned_at(to, bytes)) {
        copy_pinned(block, to, source, bytes, stream);
        return 0;
    }
    stream_of(stream)->enqueue([=] { std::memcpy(to, source, bytes); });
    if (settings().get("reaches", 0) == 0) fake_cuda_synchronize(stream);
    return 0;
}
// The host memory may change when the call returns, unless it is pinned: it has been copied by then.
int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, void* stream) {
    if (const auto block = pinned_at(from, bytes)) {
        copy_pinned(block, reinterpret_cast<void*>(to), from, bytes, stream);
        return 0;
    }
    const auto* begin = static_cast<const char*>(from);
    auto kept = std::make_shared<std::string>(begin, begin + bytes);
    stream_of(stream)->enqueue([=] { std::memcpy(reinterpret_cast<void*>(to), kept->data(), bytes); });
    return 0;
}
int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, void* stream) {
    stream_of(stream)->enqueue(
        [=] { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
    return 0;
}
}
