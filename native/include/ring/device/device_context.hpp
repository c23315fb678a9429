// One device as this rank uses it: its context, events, memory for results, and copies.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/device/driver.hpp"

namespace ring {

class DeviceContext;

// A point in the work of a stream. It goes back to its context's pool, so that making one costs no system call.
class DeviceEvent {
   public:
    explicit DeviceEvent(std::shared_ptr<DeviceContext> context);
    ~DeviceEvent();
    DeviceEvent(const DeviceEvent&) = delete;
    DeviceEvent& operator=(const DeviceEvent&) = delete;

    void record(void* stream);
    // Makes later work on the stream wait for the event. The caller does not wait.
    void hold_back(void* stream) const;
    // Whether the stream has reached the event. Throws DeviceError, also for a fault of an earlier kernel.
    bool passed() const;

   private:
    std::shared_ptr<DeviceContext> context_;
    void* handle_;
};

// Memory of the device, freed in the order of a stream.
class DeviceMemory {
   public:
    // Allocated in the order of `stream`; freed in the order of `last`, the stream of its last use.
    DeviceMemory(std::shared_ptr<DeviceContext> context, std::size_t bytes, void* stream, void* last);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
    std::size_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<DeviceContext> context_;
    std::size_t bytes_;
    std::uint64_t address_ = 0;
    void* last_;
};

class DeviceContext : public std::enable_shared_from_this<DeviceContext> {
   public:
    // The device of that ordinal. Throws DeviceError.
    DeviceContext(std::shared_ptr<const Driver> driver, int index);
    ~DeviceContext();
    DeviceContext(const DeviceContext&) = delete;
    DeviceContext& operator=(const DeviceContext&) = delete;

    // Makes the context current on this thread during its lifetime; calls of the driver need one. The thread may then
    // make calls that CUDA otherwise refuses while another thread captures a graph: ours never become part of it.
    class Current {
       public:
        explicit Current(const DeviceContext& context);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

       private:
        const Driver& driver_;
        int mode_;  // how the thread treats graphs; then how it did before
    };

    const Driver& driver() const { return *driver_; }
    int index() const { return index_; }
    const DeviceUuid& uuid() const { return uuid_; }
    std::string name() const;
    // A stream of the highest priority: operations that other ranks wait for must not wait behind computation here.
    void* make_stream() const;
    void destroy_stream(void* stream) const noexcept;
    // Whether the stream is capturing a graph.
    bool is_capturing(void* stream) const;
    // An event recorded on the stream now.
    std::shared_ptr<DeviceEvent> event_on(void* stream);
    // Pins host memory, which the device then reads and writes by itself, at the full rate of its bus: copies from and
    // to it outlive their call. False where the driver cannot pin it.
    bool pin(void* memory, std::size_t bytes) const noexcept;
    void unpin(void* memory) const noexcept;
    void copy_to_host(void* to, const void* from, std::size_t bytes, void* stream) const;
    void copy_to_device(void* to, const void* from, std::size_t bytes, void* stream) const;
    void copy_within(void* to, const void* from, std::size_t bytes, void* stream) const;

   private:
    friend class DeviceEvent;
    friend class DeviceMemory;
    void* take_event();
    void give_back(void* event) noexcept;

    std::shared_ptr<const Driver> driver_;
    int index_;
    int device_ = 0;
    void* context_ = nullptr;
    DeviceUuid uuid_;
    std::mutex mutex_;
    std::vector<void*> spare_;  // events
};

}  // namespace ring
