#include "fakes/intercepted.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <utility>

namespace {

constexpr long kNever = -1;
thread_local long allocations_left = kNever;
thread_local long failures_left = kNever;
thread_local bool failed = false;
thread_local const std::function<void()>* during_fallocate = nullptr;

void* allocate(std::size_t bytes) {
    if (allocations_left == 0) {
        failed = true;
        if (failures_left > 0 && --failures_left == 0) allocations_left = kNever;
        throw std::bad_alloc();
    }
    if (allocations_left > 0) --allocations_left;
    void* memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

namespace ring::test {

NoMemory::NoMemory(long after, long failures) {
    failed = false;
    failures_left = failures;
    allocations_left = after;
}

NoMemory::~NoMemory() { allocations_left = kNever; }

bool NoMemory::has_failed() { return failed; }

DuringFallocate::DuringFallocate(std::function<void()> call) {
    during_fallocate = new std::function<void()>(std::move(call));
}

DuringFallocate::~DuringFallocate() { delete std::exchange(during_fallocate, nullptr); }

}  // namespace ring::test

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
    if (during_fallocate != nullptr) (*during_fallocate)();
    return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, length));
}
