// A standstill: every rank of a generation waits for calls of others, and no rank is left to make them.
//
// Each rank shows in ring memory what it waits for, once it can do nothing else; a host tells the others about its
// ranks. If all ranks stand still and each operation lacks some rank, they have called different things: a mismatch
// that no gate can find, because they wait at different gates.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ring/base/shared_atomic.hpp"
#include "ring/group/header.hpp"

namespace ring {

// How an operation matches those of other ranks, in the text of what is awaited.
constexpr const char* kByName = ", by name";
constexpr const char* kByOrder = ", by order";

// An operation, or a message, that waits for other ranks to call it too.
struct Awaited {
    std::uint64_t key = 0;      // the same on all ranks that have called it; 0 for a message
    std::uint32_t needed = 0;   // ranks that have to call it
    std::uint32_t callers = 1;  // that have
    char text[176] = {};        // "allreduce sum 'x' float32 [3], by name"
};

// What one rank waits for. It stands still while it shows that again and again.
struct Standstill {
    static constexpr std::size_t kMost = 4;
    std::int64_t shown = 0;  // monotonic ns
    std::uint64_t count = 0;
    Awaited awaited[kMost];

    // Ignores entries beyond kMost.
    void add(std::uint64_t key, std::uint32_t needed, std::string_view text);
};
static_assert(sizeof(Standstill) % sizeof(std::uint64_t) == 0, "it is copied as words");

// What several ranks wait for: those that wait for the same share a line.
class StandingRanks {
   public:
    void add(int rank, const Standstill& one);
    // For another host, which may have other memory.
    std::string encode() const;
    void add_encoded(std::string_view bytes);
    // Why none of them can continue, with what each waits for; empty where some operation lacks no rank.
    std::string mismatch() const;

   private:
    struct Line {
        Awaited awaited;
        char ranks[40] = {};  // "0, 2"
    };
    void add(const Line& line);

    std::vector<Line> lines_;
};

}  // namespace ring
