// The streams, events and memory of the fake CUDA driver, and what its callers' threads have said of themselves.
#pragma once

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
