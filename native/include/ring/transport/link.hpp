// Moves bytes between ranks that do not share ring memory.
//
// Messages between two ranks with one tag arrive in the order sent. Nothing here waits: `done` polls. One link serves
// all groups of a process; tags keep groups, generations and purposes apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "ring/memory/memory.hpp"

namespace ring {

class Link {
   public:
    // A transfer under way. 0 is none.
    using Transfer = std::uint64_t;

    virtual ~Link() = default;
    // Addresses are the link's own: ranks of its job, or of its MPI communicator.
    virtual Transfer send(int to, int tag, const void* data, std::size_t bytes) = 0;
    virtual Transfer receive(int from, int tag, void* data, std::size_t bytes) = 0;
    // True when the transfer has ended (and is forgotten: it becomes 0). A transfer of 0 is done.
    virtual bool done(Transfer& transfer) = 0;
    // Cancels a transfer, and never waits for the other side. A send may read its memory after this, so that must be
    // ring memory. A receive whose message has begun to arrive cannot be cancelled and ends by itself; `keep` owns its
    // memory until then.
    virtual void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept = 0;
    // Whether a message with this tag has arrived from any rank: its source and size.
    virtual bool probe(int tag, int& source, std::size_t& bytes) = 0;
    // Receives and discards messages that were not asked for. For the end of a process, after a barrier of all.
    virtual void drain() = 0;
    // Largest tag that may be used.
    virtual int tag_limit() const = 0;

    // Takes a number below `limit`, for tags of its own: the one released longest ago that this process does not use.
    int take_number(int limit);
    void give_back(int number);

   private:
    std::mutex numbers_mutex_;
    std::set<int> numbers_;  // in use
    int last_number_ = -1;
};

// What the core must know to use an MPI without mpi.h.
struct Mpi {
    const char* module_path;   // of a module that has it loaded; null for the program itself
    std::uint64_t comm, byte;  // handles as integers
    std::size_t handle_bytes;  // size of a handle (4: MPICH and its kin, 8: Open MPI)
    int any_source, any_tag;
    int tag_limit;
};
// Through MPI point to point.
std::shared_ptr<Link> make_mpi_link(const Mpi& mpi);

// For a forked process: makes the extension module at `module_path` see MPI as not initialized. Otherwise it would
// finalize the parent's MPI at exit, which waits for all ranks.
void leave_mpi(const char* module_path);

}  // namespace ring
