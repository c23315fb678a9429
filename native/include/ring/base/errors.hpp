// What the core throws. The bindings turn each into the class of the same duty in ring_notebook.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace ring {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Ranks called different operations; the group stays usable.
struct Mismatch : Error {
    using Error::Error;
};
// Another rank failed, was interrupted, left or died; the generation has ended.
struct Aborted : Error {
    using Error::Error;
};
// A rank of another host has gone or cannot be reached; the rank that finds this ends the generation.
struct PeerLost : Error {
    using Error::Error;
};
struct Timeout : Error {
    using Error::Error;
};
struct OutOfMemory : Error {
    using Error::Error;
};
struct InvalidArgument : Error {
    using Error::Error;
};
// All ranks agree on an operation that no path can carry out; the group stays usable.
struct Unsupported : InvalidArgument {
    using InvalidArgument::InvalidArgument;
};

}  // namespace ring
