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
//   devices    how many there are (8)
//   fault      an error that a kernel has left behind: calls that report those give it (0)
//   delay_us   most that an operation of a stream is late, at random (0)
//   same_uuid  every device has the same one (0)
//   reaches    the device reaches host memory by itself: copies to it outlive their call (0)
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kNotReady = 600, kIllegalAddress = 700;
constexpr int kCapturing = 900, kCaptureImplied = 906;
constexpr int kGlobal = 0;  // mode of a thread and of a capture
constexpr int kMostDevices = 64;

[[noreturn]] void broken(const char* what) {
    std::fprintf(stderr, "fake CUDA: %s\n", what);
    std::fflush(stderr);
    _exit(70);
}

struct Settings {
    std::mutex mutex;
    std::map<std::string, long> values;
    long get(const std::string& name, long otherwise) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = values.find(name);
        if (found != values.end()) return found->second;
        const char* text = std::getenv(("FAKE_CUDA_" + name).c_str());
        return text != nullptr ? std::atol(text) : otherwise;
    }
};
// Never destroyed: streams run until the process ends.
Settings& settings() {
    static auto* all = new Settings;
    return *all;
}

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned long recorded = 0, passed = 0;
};

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    int device = 0;
    bool busy = false;
    bool capturing = false;
    bool globally = false;  // is it captured
    bool spoilt = false;    // the graph
    bool ended = false;

    void enqueue(std::function<void()> work) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (ended) broken("a stream is used that has been destroyed");
            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }
    bool idle() {
        const std::lock_guard<std::mutex> lock(mutex);
        return queue.empty() && !busy;
    }
    void main() {
        std::mt19937 random(std::random_device{}());
        for (;;) {
            std::function<void()> work;
            {
                std::unique_lock<std::mutex> lock(mutex);
                busy = false;
                changed.notify_all();
                changed.wait(lock, [this] { return !queue.empty() || ended; });
                if (queue.empty()) return;
                work = std::move(queue.front());
                queue.pop_front();
                busy = true;
            }
            const long delay = settings().get("delay_us", 0);
            if (delay > 0)
                std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned long>(delay)));
            work();
        }
    }
};

// What is enqueued on a stream that has been destroyed is still carried out.
std::shared_ptr<Stream> make_stream(int device) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    std::thread([stream] { stream->main(); }).detach();
    return stream;
}

struct World {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Stream>> streams;
    std::map<int, std::shared_ptr<Stream>> defaults;
    std::map<void*, std::shared_ptr<Event>> events;
    std::map<std::uint64_t, std::size_t> memory;
};
World& world() {
    static auto* all = new World;
    return *all;
}

thread_local std::deque<int> contexts;  // devices, the current one last
thread_local int capture_mode = kGlobal;

int device_of(void* context) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1; }

// The null stream is the default one of the current device.
std::shared_ptr<Stream> stream_of(void* handle) {
    World& all = world();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (handle == nullptr) {
        if (contexts.empty()) return nullptr;
        std::shared_ptr<Stream>& stream = all.defaults[contexts.back()];
        if (stream == nullptr) stream = make_stream(contexts.back());
        return stream;
    }
    const auto found = all.streams.find(handle);
    if (found == all.streams.end()) broken("a stream is used that was never made, or was destroyed");
    return found->second;
}

std::shared_ptr<Event> event_of(void* handle) {
    World& all = world();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.events.find(handle);
    if (found == all.events.end()) broken("an event is used that was never made, or was destroyed");
    return found->second;
}

int fault() { return static_cast<int>(settings().get("fault", 0)); }

// What this thread may not do while a graph is captured anywhere.
int unsafe() {
    if (capture_mode != kGlobal) return fault();
    World& all = world();
    const std::lock_guard<std::mutex> lock(all.mutex);
    bool spoils = false;
    for (const auto& one : all.streams) {
        if (!one.second->capturing || !one.second->globally) continue;
        spoils = one.second->spoilt = true;
    }
    return spoils ? kCapturing : fault();
}

}  // namespace

extern "C" {

// --- for the fake NCCL and for tests ---

void fake_cuda_set(const char* name, long value) {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    settings().values[name] = value;
}

void fake_cuda_enqueue(void* stream, std::function<void()>* work) { stream_of(stream)->enqueue(std::move(*work)); }

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

int cuInit(unsigned) { return 0; }
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
int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, void* stream) {
    if (const int error = unsafe(); error != 0) return error;
    stream_of(stream)->enqueue([=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
    if (settings().get("reaches", 0) == 0) fake_cuda_synchronize(stream);
    return 0;
}
// The host memory may change when the call returns: it has been copied by then.
int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, void* stream) {
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
