// Remembers which process made an object. A forked child has a copy of it, but must not release what the parent holds.
#pragma once

#include <cstdint>

namespace ring {

// Counts forks instead of calling getpid, a system call, so that every operation can ask.
class Owner {
   public:
    Owner();
    bool is_this_process() const;

   private:
    std::int64_t pid_;
    std::uint32_t forks_;
};

}  // namespace ring
