// The order in which this rank launches the operations on devices of all its groups.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "ring/group/host_group.hpp"

namespace ring {

// Any thread: a communicator may be dropped while others are served.
class LaunchOrder {
   public:
    // The rank has posted the header of an operation of that group that may be one on devices. `id` is the same on all
    // ranks and tells groups apart that span hosts; 0 for others.
    void enter(HostGroup& group, std::uint64_t gate, std::uint64_t id);
    // The rank has launched the operation, or will not.
    void leave(const HostGroup& group);
    // Whether the operation of that group is the next one. False as long as its ticket is not taken.
    bool is_next(HostGroup& group) const;

   private:
    struct Candidate {
        HostGroup* group;
        std::uint64_t gate;
        std::uint64_t id;
    };
    void erase(const HostGroup& group);

    mutable std::mutex mutex_;
    std::vector<Candidate> candidates_;
};

}  // namespace ring
