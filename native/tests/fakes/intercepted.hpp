// Calls of the C++ and C libraries that this program takes over, so that a test can make them fail or see them.
#pragma once

#include <functional>

namespace ring::test {

// While it lives, allocations of this thread fail after the first `after` ones, and as many as `failures` of them.
class NoMemory {
   public:
    explicit NoMemory(long after = 0, long failures = -1);
    ~NoMemory();
    NoMemory(const NoMemory&) = delete;
    NoMemory& operator=(const NoMemory&) = delete;

    // Whether one has failed.
    static bool has_failed();
};

// While it lives, this is called in the middle of every fallocate of this thread.
class DuringFallocate {
   public:
    explicit DuringFallocate(std::function<void()> call);
    ~DuringFallocate();
    DuringFallocate(const DuringFallocate&) = delete;
    DuringFallocate& operator=(const DuringFallocate&) = delete;
};

}  // namespace ring::test
