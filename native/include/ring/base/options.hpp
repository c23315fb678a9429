// The user's settings of the core. The core reads no environment: ring_notebook/config.py reads and checks the
// variables named here, and the bindings pass their values with each generation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/base/dtypes_and_ops.hpp"

namespace ring {

// How a rank writes segments to ring memory: whichever way is faster, into the cache, or past it.
enum class StagingWay : std::uint8_t { Auto, Cache, Memory };

struct Options {
    // RING_WIRE: the type that float32 sums are rounded to between hosts; Float32 does not round.
    DType wire = DType::Float32;
    // RING_STAGING
    StagingWay staging = StagingWay::Auto;
    // RING_INLINE: bytes up to which a payload travels in its rank's mailbox, with one gate.
    std::size_t inline_bytes = 16 << 10;
    // RING_SEGMENT: bytes of a segment; 0 chooses by ranks and cores.
    std::size_t segment_bytes = 0;
    // RING_SPIN: microseconds that a wait spins before it sleeps; a negative number chooses by ranks and cores.
    double spin = -1.0;
    // RING_STALL_WARNING: seconds that an operation waits for ranks before standard error names them; 0 for never.
    double stall_warning = 0.0;
    // Seconds until ranks that all wait for one another fail; 0 for never.
    double standstill = 5.0;
    // RING_FUSION_THRESHOLD: most bytes of operations that are fused into one; the smallest value of all ranks counts.
    std::uint64_t fusion_threshold = std::uint64_t{64} << 20;
};

}  // namespace ring
