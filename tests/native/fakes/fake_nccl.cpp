// NCCL without a device, for tests: its communicators meet in a file that all processes map, its kernels run on the
// streams of the fake CUDA driver and wait for one another as NCCL's do.
//
// It holds its callers to NCCL's rules. With a message it ends a process whose ranks launch different operations, or
// operations in different orders (a kernel then waits until `deadlock_ms`), one in which two threads are in one
// communicator at a time, and one that uses a communicator which it has destroyed or is aborting. A communicator that
// is not ready refuses operations.
//
// Settings, by fake_nccl_set(name, value) or FAKE_NCCL_NAME in the environment:
//   version        (22907)
//   launch_us      most that a launch is late, at random, on a thread of its own (300)
//   launch_late_us and least (0)
//   kernel_us      most that a kernel takes longer, at random (0)
//   init_fails     connecting ends with an error
//   init_hangs     connecting never ends
//   wrong          sums are one too large
//   error_at       the operation of that number, counted from 1 since it was set, ends with an asynchronous error
//   abort_hangs    an abort never returns, and ends no kernel
//   ends_late_us   an abort fails at once, and a kernel that it ends goes on for that long
//   deadlock_ms    (20000)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>

#include "fake_kernels.hpp"

extern "C" {
void fake_cuda_enqueue(void* stream, std::function<void()>* work);
int fake_cuda_current_device();
int fake_cuda_device_of(void* stream);
}

namespace {

struct Config {
    std::size_t size;
    unsigned magic, version;
    int blocking, cga, least, most;
    const char* net;
    int split;
};

struct World {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Communicator>> communicators;
};
// Never destroyed: kernels run until the process ends.
World& world() {
    static auto* all = new World;
    return *all;
}

using Handle = void*;
std::shared_ptr<Communicator> communicator_of(Handle handle) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    const auto found = world().communicators.find(handle);
    if (found == world().communicators.end())
        broken("a communicator is used that was never made, was destroyed, or is being aborted");
    return found->second;
}
// From here on nobody uses it.
std::shared_ptr<Communicator> take(Handle handle) {
    std::shared_ptr<Communicator> communicator = communicator_of(handle);
    if (communicator->in_use.exchange(true)) broken("a communicator is ended while a thread is in it");
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().communicators.erase(handle);
    return communicator;
}

// One thread at a time may call a communicator.
class Use {
   public:
    explicit Use(Handle handle) : communicator_(communicator_of(handle)) {
        if (communicator_->in_use.exchange(true)) broken("two threads are in one communicator");
    }
    ~Use() { communicator_->in_use.store(false); }
    Communicator* operator->() const { return communicator_.get(); }
    const std::shared_ptr<Communicator>& get() const { return communicator_; }

   private:
    std::shared_ptr<Communicator> communicator_;
};

// Kernels that run, by stream: an abort returns when its device has none.
std::mutex running_mutex;
std::condition_variable running_changed;
std::map<void*, int>& running() {
    static auto* all = new std::map<void*, int>;
    return *all;
}

std::atomic<long> operations{0};   // launched
std::atomic<long> connections{0};  // begun
std::atomic<long> aborts{0};
std::atomic<long> ended_late{0};  // kernels, behind their abort
thread_local int depth = 0;
thread_local std::vector<std::pair<std::shared_ptr<Communicator>, Call>> grouped;
thread_local std::vector<std::shared_ptr<Communicator>> aborting;

void launch(const std::shared_ptr<Communicator>& communicator, std::vector<Call> calls) {
    void* const stream = calls.front().stream;
    const bool fails = ++operations == setting("error_at", 0);
    communicator->stream = stream;
    communicator->state.store(kInProgress);
    {
        const std::lock_guard<std::mutex> lock(running_mutex);
        ++running()[stream];
    }
    std::thread([communicator, calls = std::move(calls), stream, fails] {
        std::this_thread::sleep_for(std::chrono::microseconds(setting("launch_late_us", 0)));
        pause_up_to(setting("launch_us", 300));
        std::function<void()> kernel = [communicator, calls, stream, fails] {
            if (fails) {
                communicator->state.store(kRemote);
                while (!communicator->aborted.load()) std::this_thread::sleep_for(std::chrono::microseconds(200));
            } else {
                Kernel(communicator.get(), calls).run();
            }
            if (communicator->aborted.load() && setting("ends_late_us", 0) != 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(setting("ends_late_us", 0)));
                ++ended_late;
            }
            {
                const std::lock_guard<std::mutex> lock(running_mutex);
                --running()[stream];
            }
            running_changed.notify_all();
        };
        fake_cuda_enqueue(stream, &kernel);
        int under_way = kInProgress;
        communicator->state.compare_exchange_strong(under_way, kSuccess);
    }).detach();
}

int add(Handle handle, Call call) {
    const Use use(handle);
    if (use->state.load() != kSuccess) return kUsage;
    if (fake_cuda_device_of(call.stream) != use->device)
        broken("a stream of device " + std::to_string(fake_cuda_device_of(call.stream)) +
               " is given to a communicator that was made for device " + std::to_string(use->device));
    call.factor = call.op >= kFirstOwnOp ? use->factors.at(call.op) : 1.0;
    if (depth > 0) {
        grouped.emplace_back(use.get(), call);
    } else {
        launch(use.get(), {call});
    }
    return kSuccess;
}

void connect(Communicator* communicator, const std::string& path) {
    const int file = open(path.c_str(), O_RDWR);
    if (file < 0 || setting("init_fails", 0) != 0) {
        communicator->state.store(kSystem);
        return;
    }
    communicator->meeting =
        static_cast<Meeting*>(mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    if (communicator->meeting->here.fetch_add(1) + 1 == communicator->size) unlink(path.c_str());
    while (communicator->meeting->here.load() < communicator->size || setting("init_hangs", 0) != 0) {
        if (communicator->aborted.load()) {
            unlink(path.c_str());
            return;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    communicator->state.store(kSuccess);
}

int abort_all(const std::vector<std::shared_ptr<Communicator>>& all) {
    if (setting("abort_hangs", 0) != 0)
        for (;;) pause();
    for (const auto& one : all) one->aborted.store(true);
    ++aborts;
    for (const auto& one : all)
        if (one->connecting.joinable()) one->connecting.join();
    if (setting("ends_late_us", 0) != 0) return kInternal;
    for (const auto& one : all) {
        std::unique_lock<std::mutex> lock(running_mutex);
        running_changed.wait(lock, [&] { return running()[one->stream] == 0; });
    }
    return kSuccess;
}

}  // namespace

extern "C" {

struct Id {
    char bytes[128];
};

void fake_nccl_set(const char* name, long value) {
    if (std::strcmp(name, "error_at") == 0) operations = 0;
    const std::lock_guard<std::mutex> lock(settings().mutex);
    settings().values[name] = value;
}

// Communicators that this process has begun to connect so far.
long fake_nccl_connections() { return connections.load(); }

long fake_nccl_aborts() { return aborts.load(); }
long fake_nccl_ended_late() { return ended_late.load(); }

int ncclGetVersion(int* version) {
    *version = static_cast<int>(setting("version", 22907));
    return kSuccess;
}
const char* ncclGetErrorString(int result) {
    static const char* texts[] = {"no error",
                                  "unhandled cuda error",
                                  "unhandled system error",
                                  "internal error",
                                  "invalid argument",
                                  "invalid usage",
                                  "remote process exited or there was a network error",
                                  "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(Handle) { return ""; }

int ncclGetUniqueId(Id* id) {
    std::memset(id, 0, sizeof *id);
    const char* folder = std::getenv("TMPDIR");
    std::snprintf(id->bytes, sizeof id->bytes, "%s/fake-nccl-XXXXXX", folder != nullptr ? folder : "/tmp");
    const int file = mkstemp(id->bytes);
    if (file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return kSystem;
    close(file);
    return kSuccess;
}

int ncclCommInitRankConfig(Handle* made, int size, Id id, int rank, Config* config) {
    if (config == nullptr || config->size != 48 || config->magic != 0xcafebeef || config->version != 21800 ||
        size > kRanks)
        return kArgument;
    if (config->blocking != 0) broken("a communicator that blocks");
    const auto communicator = std::make_shared<Communicator>();
    communicator->size = size;
    communicator->rank = rank;
    communicator->device = fake_cuda_current_device();
    communicator->connecting =
        std::thread([one = communicator.get(), path = std::string(id.bytes)] { connect(one, path); });
    ++connections;
    *made = communicator.get();
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().communicators[communicator.get()] = communicator;
    return kInProgress;
}

int ncclCommGetAsyncError(Handle handle, int* state) {
    *state = Use(handle)->state.load();
    return kSuccess;
}

int ncclCommFinalize(Handle handle) {
    const Use use(handle);
    return kSuccess;
}
int ncclCommDestroy(Handle handle) {
    const std::shared_ptr<Communicator> communicator = take(handle);
    if (communicator->connecting.joinable()) communicator->connecting.join();
    return kSuccess;
}
int ncclCommAbort(Handle handle) {
    if (handle == nullptr) return kSuccess;
    if (depth > 0) {
        aborting.push_back(take(handle));
        return kSuccess;
    }
    return abort_all({take(handle)});
}

int ncclGroupStart() {
    ++depth;
    return kSuccess;
}
int ncclGroupEnd() {
    if (--depth > 0) return kSuccess;
    if (!aborting.empty()) return abort_all(std::exchange(aborting, {}));
    std::map<std::shared_ptr<Communicator>, std::vector<Call>> kernels;
    for (const auto& [communicator, call] : grouped) kernels[communicator].push_back(call);
    const bool any = !grouped.empty();
    grouped.clear();
    for (auto& [communicator, calls] : kernels) launch(communicator, std::move(calls));
    return any ? kInProgress : kSuccess;
}

int ncclAllReduce(const char* input, char* output, std::size_t count, int dtype, int op, Handle c, void* stream) {
    return add(c, {Call::AllReduce, input, output, count, dtype, op, 0, 1.0, stream});
}
int ncclReduce(const char* input, char* output, std::size_t count, int dtype, int op, int root, Handle c,
               void* stream) {
    return add(c, {Call::Reduce, input, output, count, dtype, op, root, 1.0, stream});
}
int ncclBroadcast(const char* input, char* output, std::size_t count, int dtype, int root, Handle c, void* stream) {
    return add(c, {Call::Broadcast, input, output, count, dtype, 0, root, 1.0, stream});
}
int ncclAllGather(const char* input, char* output, std::size_t count, int dtype, Handle c, void* stream) {
    return add(c, {Call::AllGather, input, output, count, dtype, 0, 0, 1.0, stream});
}
int ncclReduceScatter(const char* input, char* output, std::size_t count, int dtype, int op, Handle c, void* stream) {
    return add(c, {Call::ReduceScatter, input, output, count, dtype, op, 0, 1.0, stream});
}
int ncclSend(const char* input, std::size_t count, int dtype, int peer, Handle c, void* stream) {
    return add(c, {Call::Send, input, nullptr, count * item_size(dtype), dtype, 0, peer, 1.0, stream});
}
int ncclRecv(char* output, std::size_t count, int dtype, int peer, Handle c, void* stream) {
    return add(c, {Call::Receive, nullptr, output, count * item_size(dtype), dtype, 0, peer, 1.0, stream});
}
int ncclRedOpCreatePreMulSum(int* op, const char* scalar, int dtype, int residence, Handle communicator) {
    const Use use(communicator);
    if (residence != 1) return kArgument;
    *op = kFirstOwnOp + static_cast<int>(use->factors.size());
    use->factors[*op] = load(scalar, dtype);
    return kSuccess;
}
int ncclRedOpDestroy(int op, Handle communicator) {
    const Use use(communicator);
    return use->factors.count(op) != 0 ? kSuccess : kArgument;
}
}
