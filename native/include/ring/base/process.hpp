// Which process made an object: a fork copies it, and what it did to the world stays the parent's to undo.
#pragma once

#include <cstdint>

namespace ring {

// Remembers the process that it was made in. Cheap enough to ask in every operation: getpid is a system call.
class Owner {
   public:
    Owner();
    bool is_this_process() const;

   private:
    std::int64_t pid_;
    std::uint32_t forks_;
};

}  // namespace ring
