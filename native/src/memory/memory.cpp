#include "ring/memory/memory.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>

#include "ring/base/errors.hpp"
#include "ring/memory/memory_file.hpp"
#include "ring/memory/memory_left.hpp"

namespace ring {
namespace {

constexpr std::uint64_t kMagic = 0x52494e474d454d31;  // "RINGMEM1"
// The arenas of all ranks together stay below this. Without RING_MEMORY they also stay below half of the address space
// of the process (128 TiB on x86-64, 512 GiB on some aarch64 kernels, less under `ulimit -v`) and within the largest
// file that it may write (`ulimit -f`).
constexpr std::size_t kMostMapped = std::size_t{32} << 40;
constexpr std::size_t kLeastArena = std::size_t{256} << 20;
// Free bytes that a folder needs to take the place of memory without a name.
constexpr std::size_t kLeastRoom = std::size_t{256} << 20;

struct RingMemoryHeader {
    std::uint64_t magic;
    std::uint64_t token;
    std::uint64_t arena;
    std::int32_t local_size;
};

std::size_t control_bytes(int local_size) {
    return round_up(sizeof(RankSlot) * (static_cast<std::size_t>(local_size) + 1), kHugePage);
}

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno); }

std::size_t machine_memory() {
    struct sysinfo info{};
    if (sysinfo(&info) != 0) return std::size_t{64} << 30;
    return static_cast<std::size_t>(info.totalram) * info.mem_unit;
}

std::size_t largest_file() {
    struct rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return ~std::size_t{0};
    return static_cast<std::size_t>(limit.rlim_cur);
}

bool addressable(std::size_t bytes) {
    void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return place != MAP_FAILED && munmap(place, bytes) == 0;
}

// From /proc/PID/stat; false where that cannot be read. The process name in it may contain anything, so the fields
// count from the last parenthesis: the state first, and the start time 19 words later.
bool read_life(std::int64_t pid, char& state, std::uint64_t& began) {
    char text[1024];
    std::snprintf(text, sizeof text, "/proc/%" PRId64 "/stat", pid);
    FILE* file = std::fopen(text, "re");
    if (file == nullptr) return false;
    text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
    std::fclose(file);
    const char* name_ends = std::strrchr(text, ')');
    return name_ends != nullptr &&
           std::sscanf(name_ends + 1,
                       " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64, &state,
                       &began) == 2;
}

// For systems without pidfd_open: kernels before 5.3, and sandboxes that forbid it.
bool has_ended(pid_t pid, std::uint64_t began) {
    char state = 0;
    std::uint64_t now_began = 0;
    if (read_life(pid, state, now_began))
        return state == 'Z' || state == 'X' ||
               (began != 0 && now_began != began);  // another process may have the pid now
    return kill(pid, 0) != 0 && errno == ESRCH;
}

}  // namespace

std::shared_ptr<RingMemory> RingMemory::create(int local_rank, int local_size, std::size_t arena) {
    if (local_size < 1 || local_rank < 0 || local_rank >= local_size)
        throw InvalidArgument("ring memory: local rank " + std::to_string(local_rank) + " of " +
                              std::to_string(local_size) + " ranks does not exist");
    const int fd = memory_file("ring", kLeastRoom);
    if (fd < 0)
        throw OutOfMemory(
            system_error("ring memory: memfd_create is refused") +
            ", and no folder can take its place. Allow the call, or make /dev/shm or /tmp writable, with " +
            gib_text(kLeastRoom) + " free.");
    const auto ranks = static_cast<std::size_t>(local_size);
    const bool asked = arena != 0;
    if (!asked) arena = machine_memory();
    arena = round_up(std::min(arena, kMostMapped / ranks), kHugePage);
    const auto length_of = [&](std::size_t each) { return control_bytes(local_size) + each * ranks; };
    const auto fits = [&] { return addressable(2 * arena * ranks) && length_of(arena) <= largest_file(); };
    while (!asked && arena / 2 >= kLeastArena && !fits()) arena = round_up(arena / 2, kHugePage);
    const std::size_t length = length_of(arena);
    if (length > largest_file()) {
        close(fd);
        throw OutOfMemory("ring memory: " + std::to_string(local_size) + " ranks need a file of " + gib_text(length) +
                          ", and files may be at most " + gib_text(largest_file()) +
                          ". Raise `ulimit -f`, or set RING_MEMORY to the bytes that one rank needs.");
    }
    std::uint64_t token = std::random_device{}();
    token = token << 32 | std::random_device{}();
    if (ftruncate(fd, static_cast<off_t>(length)) != 0 ||
        !reserve_room(fd, 0, static_cast<off_t>(control_bytes(local_size)))) {
        const std::string why = system_error("ring memory: cannot size it to " + gib_text(length));
        close(fd);
        throw OutOfMemory(why);
    }
    auto mapping = std::make_shared<Mapping>(fd, length);
    std::shared_ptr<RingMemory> self(new RingMemory(local_rank, local_size, std::move(mapping), arena, token));
    for (int rank = 0; rank < local_size; ++rank) new (&self->slot(rank)) RankSlot();
    self->introduce();
    *self->at<RingMemoryHeader>(0) = {kMagic, token, arena, local_size};
    return self;
}

std::shared_ptr<RingMemory> RingMemory::attach(int local_rank, int local_size, std::int64_t pid, int fd,
                                               std::uint64_t token) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0)
        throw Error(system_error("ring memory: local rank " + std::to_string(local_rank) + " cannot open " + path) +
                    ". Ranks of one host must run as one user and see each other's /proc.");
    struct stat info{};
    RingMemoryHeader header{};
    const bool readable = fstat(own, &info) == 0 && pread(own, &header, sizeof header, 0) == sizeof header;
    if (!readable || header.magic != kMagic || header.token != token || header.local_size != local_size) {
        close(own);
        throw Error("ring memory: " + path +
                    " is not the memory that this job's first rank made. "
                    "Do the ranks of this host share one process namespace?");
    }
    const std::size_t length = control_bytes(local_size) + header.arena * static_cast<std::size_t>(local_size);
    auto mapping = std::make_shared<Mapping>(own, length);
    return std::shared_ptr<RingMemory>(new RingMemory(local_rank, local_size, std::move(mapping), header.arena, token));
}

std::shared_ptr<RingMemory> RingMemory::share(int local_rank) const {
    // A rank's second object would hand out blocks that the first one has given away.
    if (local_rank == local_rank_)
        throw Error("ring memory: local rank " + std::to_string(local_rank) + " has its arena already, share() " +
                    "takes another rank of this process; allocate from the object that you have");
    return std::shared_ptr<RingMemory>(new RingMemory(local_rank, local_size_, mapping_, arena_.bytes(), token_));
}

RingMemory::Mapping::Mapping(int descriptor, std::size_t bytes) : fd(descriptor), length(bytes) {
    void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED) {
        const std::string why = system_error("ring memory: cannot map " + gib_text(length) + " of address space");
        close(fd);
        throw OutOfMemory(why + ". Raise `ulimit -v`, or set RING_MEMORY to the bytes that one rank needs.");
    }
    base = static_cast<std::byte*>(mapped);
    madvise(base, length, MADV_DONTDUMP);
    madvise(base, length, MADV_HUGEPAGE);
}

RingMemory::Mapping::~Mapping() {
    munmap(base, length);
    close(fd);
}

RingMemory::RingMemory(int local_rank, int local_size, std::shared_ptr<Mapping> mapping, std::size_t arena,
                       std::uint64_t token)
    : local_rank_(local_rank),
      local_size_(local_size),
      mapping_(std::move(mapping)),
      pid_(getpid()),
      token_(token),
      arena_(mapping_->fd, control_bytes(local_size) + arena * static_cast<std::size_t>(local_rank), arena,
             local_rank) {
    pidfds_.assign(static_cast<std::size_t>(local_size_), -1);
    introduce();
}

void RingMemory::introduce() {
    char state = 0;
    std::uint64_t began = 0;
    read_life(pid_, state, began);
    publish_cores();
    slot(local_rank_).began.store(began, std::memory_order_relaxed);
    slot(local_rank_).pid.store(pid_, std::memory_order_release);
}

void RingMemory::publish_cores() {
    std::uint64_t words[kCoreWords] = {};
    // A sandbox may refuse the question: then all processors that are online count.
    if (sched_getaffinity(0, sizeof words, reinterpret_cast<cpu_set_t*>(words)) != 0) {
        const long online = std::min(sysconf(_SC_NPROCESSORS_ONLN), static_cast<long>(64 * kCoreWords));
        for (long i = 0; i < online; ++i) words[i / 64] |= std::uint64_t{1} << (i % 64);
    }
    for (std::size_t i = 0; i < kCoreWords; ++i) slot(local_rank_).cores[i].store(words[i], std::memory_order_relaxed);
}

int RingMemory::cores() const {
    int count = 0;
    for (std::size_t i = 0; i < kCoreWords; ++i) {
        std::uint64_t any = 0;
        for (int rank = 0; rank < local_size_; ++rank) any |= slot(rank).cores[i].load(std::memory_order_relaxed);
        count += __builtin_popcountll(any);
    }
    return std::max(count, 1);
}

RingMemory::~RingMemory() {
    for (int pidfd : pidfds_)
        if (pidfd >= 0) close(pidfd);
}

RankSlot& RingMemory::slot(int rank) const {
    return *at<RankSlot>(sizeof(RankSlot) * (static_cast<std::size_t>(rank) + 1));
}

std::uint64_t RingMemory::offset_of(const void* address, std::size_t bytes) const {
    const auto* first = static_cast<const std::byte*>(address);
    if (first < mapping_->base || first + bytes > mapping_->base + mapping_->length) return kNowhere;
    return static_cast<std::uint64_t>(first - mapping_->base);
}

std::uint64_t RingMemory::allocate(std::size_t bytes) {
    if (!owned())
        throw Error("ring memory: a forked process cannot take ring memory of process " + std::to_string(pid_));
    arena_.reclaim(*this);
    return arena_.allocate(bytes);
}

void RingMemory::trim() noexcept {
    if (!owned()) return;
    arena_.trim();
}

void RingMemory::drop_dead() noexcept {
    if (!owned()) return;
    const std::size_t arena = arena_.bytes();
    for (int rank = 0; rank < local_size_; ++rank) {
        if (!dead(rank)) continue;
        const std::size_t begin = control_bytes(local_size_) + arena * static_cast<std::size_t>(rank);
        fallocate(mapping_->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                  static_cast<off_t>(arena));  // if the system refuses, the pages stay until the last rank ends
    }
}

bool RingMemory::stopped(int rank) const {
    char state = '\0';
    std::uint64_t began = 0;
    return read_life(slot(rank).pid.load(std::memory_order_acquire), state, began) && (state == 'T' || state == 't');
}

bool RingMemory::dead(int rank) noexcept {
    const auto pid = static_cast<pid_t>(slot(rank).pid.load(std::memory_order_acquire));
    if (pid == 0 || pid == getpid()) return false;
    const std::lock_guard<std::mutex> lock(watching_);
    int& pidfd = pidfds_[static_cast<std::size_t>(rank)];
    if (pidfd < 0) {
        pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
        if (pidfd < 0) return errno == ESRCH || has_ended(pid, slot(rank).began.load(std::memory_order_relaxed));
    }
    pollfd waiter{pidfd, POLLIN, 0};
    return poll(&waiter, 1, 0) == 1;
}

}  // namespace ring
