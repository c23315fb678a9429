// Calls of the C++ and C libraries that this program replaces, so that a test can make them fail or observe them.
#pragma once

#include <functional>

namespace ring::test {

// During its lifetime the first `after` allocations of this thread succeed, and the next `failures` ones fail.
class NoMemory {
   public:
    explicit NoMemory(long after = 0, long failures = -1);
    ~NoMemory();
    NoMemory(const NoMemory&) = delete;
    NoMemory& operator=(const NoMemory&) = delete;

    // Whether an allocation has failed.
    static bool has_failed();
};

// During its lifetime a function is called in the middle of every fallocate of this thread.
class DuringFallocate {
   public:
    explicit DuringFallocate(std::function<void()> call);
    ~DuringFallocate();
    DuringFallocate(const DuringFallocate&) = delete;
    DuringFallocate& operator=(const DuringFallocate&) = delete;
};

}  // namespace ring::test
