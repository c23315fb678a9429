// What a rank posts for each operation, so that the others can check that they are all doing the same thing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "ring/base/dtypes_and_ops.hpp"
#include "ring/base/shared_atomic.hpp"
#include "ring/memory/memory.hpp"

namespace ring {

constexpr int kMaxDims = 8;
constexpr std::size_t kNameBytes = 72;

struct Header {
    // One cache line, equal on ranks that call the same thing (`agrees_at_once`).
    std::uint64_t sequence = 0;
    OpKind kind = OpKind::Barrier;
    DType dtype = DType::UInt8;
    ReduceOp op = ReduceOp::Sum;
    std::uint8_t dims = 0;
    std::uint8_t is_inline = 0;   // the payload travels in the mailbox
    DType wire = DType::Float32;  // what float32 becomes between hosts, while it is on its way
    Device device = Device::Cpu;  // that the tensors are on
    std::uint8_t operations = 1;  // that its call starts, one for each dtype of a list: 255 for more
    std::int32_t root = -1;
    std::int32_t tensors = 1;
    std::uint64_t count = 0;   // elements
    std::uint64_t layout = 0;  // hash of shapes that are fused; a commit's newest change
    double prescale = 1.0;
    double postscale = 1.0;
    std::uint64_t digest = 0;  // of shape and name
    // Behind the line, and not compared at once.
    std::uint64_t input = kNowhere;  // offset in ring memory, where the tensor lies there
    std::uint64_t output = kNowhere;
    std::uint64_t joined_at = 0;   // sequence at which this rank joined
    std::int64_t join_called = 0;  // and when it called join, ns: ranks may join at one sequence
    std::int64_t shape[kMaxDims] = {};
    char name[kNameBytes] = {};
};
static_assert(sizeof(Header) % sizeof(std::uint64_t) == 0, "a header is copied as words");
constexpr std::size_t kHeaderLine = 64;
static_assert(offsetof(Header, input) == kHeaderLine, "what ranks compare first is one cache line");

// A T that other processes may read while it is written: copied word by word with relaxed atomics. Readers that need
// a consistent copy are ordered by the gate; diagnostics accept a torn one.
template <class T>
class SharedCopy {
   public:
    void store(const T& value) {
        std::uint64_t raw[kWords];
        std::memcpy(raw, &value, sizeof(T));
        for (std::size_t i = 0; i < kWords; ++i) words_[i].store(raw[i], std::memory_order_relaxed);
    }
    T load() const {
        std::uint64_t raw[kWords];
        for (std::size_t i = 0; i < kWords; ++i) raw[i] = words_[i].load(std::memory_order_relaxed);
        T value;
        std::memcpy(&value, raw, sizeof(T));
        return value;
    }
    // Whether its first `words` words are those of `value`.
    bool begins_like(const T& value, std::size_t words) const {
        std::uint64_t differs = 0;
        for (std::size_t i = 0; i < words; ++i) {
            std::uint64_t wanted;
            std::memcpy(&wanted, reinterpret_cast<const char*>(&value) + i * sizeof wanted, sizeof wanted);
            differs |= wanted ^ words_[i].load(std::memory_order_relaxed);
        }
        return differs == 0;
    }

   private:
    static constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);
    SharedAtomic<std::uint64_t> words_[kWords];
};

// The layout of a fused group: a hash, equal on ranks that fuse tensors of the same shapes in the same order. Begin
// with kNoShapes and add one shape after another.
constexpr std::uint64_t kNoShapes = 1469598103934665603ull;
std::uint64_t add_shape(std::uint64_t hash, const std::int64_t* shape, int dims);

// Notes the digest, once shape and name are set.
void set_digest(Header& header);

// Cuts a long name at the end of a character, and appends a hash of the whole name.
void set_name(Header& header, std::string_view name);

// " 'grad'", or nothing where there is no name.
std::string quoted_name(const Header& header);
// "float32 [3, 4]", or "float32 2 tensors, 24 elements"
std::string tensor_text(const Header& header);
// "allreduce 'grad'"
std::string title(const Header& header);
// "allreduce 'grad' (sequence 7)", without the number where the operation had none yet.
std::string describe(const Header& header);

}  // namespace ring
