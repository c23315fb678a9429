// Moves bytes between ranks that do not share ring memory.
//
// Messages between two ranks with one tag arrive in the order sent. Nothing here waits: `done` polls. One link serves
// all groups of a process; tags keep groups, epochs and purposes apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ring/memory.hpp"

namespace ring {

class Link {
   public:
    // A transfer under way. 0 is none.
    using Transfer = std::uint64_t;

    virtual ~Link() = default;
    // Addresses are the link's own: ranks of its MPI communicator, or local ranks of its domain.
    virtual Transfer send(int to, int tag, const void* data, std::size_t bytes) = 0;
    virtual Transfer receive(int from, int tag, void* data, std::size_t bytes) = 0;
    // True when the transfer has ended (and is forgotten: it becomes 0). A transfer of 0 is done.
    virtual bool done(Transfer& transfer) = 0;
    // Gives up a transfer: its memory is not touched any more when this returns (a receive), or may still be read but
    // belongs to ring memory (a send).
    virtual void cancel(Transfer& transfer) = 0;
    // Whether a message with this tag has come from anyone: its source and size.
    virtual bool probe(int tag, int& source, std::size_t& bytes) = 0;
    // Receives and forgets whatever has come that nobody asked for. For the end of a process, after all have met.
    virtual void drain() = 0;
    // Largest tag that may be used.
    virtual int tag_limit() const = 0;
};

// Through MPI point to point, without mpi.h: `library` is a handle from dlopen of a module that has MPI loaded, `comm`
// and `byte` are MPI handles as integers, `handle_bytes` the size of a handle (4: MPICH and its kin, 8: Open MPI).
std::shared_ptr<Link> make_mpi_link(const char* module_path, std::uint64_t comm, std::uint64_t byte,
                                    std::size_t handle_bytes, int tag_limit);

// Through ring memory: for the ring within one host, and for tests that need no second host. `offset` is what
// `reserve_memory_link` gave to one of the ranks, the same for all.
std::uint64_t reserve_memory_link(Domain& domain);
std::shared_ptr<Link> make_memory_link(std::shared_ptr<Domain> domain, std::uint64_t offset);

}  // namespace ring
