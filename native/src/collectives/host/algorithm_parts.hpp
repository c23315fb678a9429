// Helpers of the algorithms: iteration over the tensors of a fused operation, and the sources of a reduction.
#pragma once

#include <algorithm>
#include <cstring>

#include "ring/collectives/host/algorithm.hpp"

namespace ring {

// Calls visit(piece, offset in the piece, offset in the range, elements) for the parts of [begin, end) of the fused
// tensor, which is the concatenation of `pieces`.
template <class Visit>
void for_range(const std::vector<Piece>& pieces, std::uint64_t begin, std::uint64_t end, Visit&& visit) {
    std::uint64_t start = 0;
    for (const Piece& piece : pieces) {
        const std::uint64_t from = std::max(begin, start);
        const std::uint64_t to = std::min(end, start + piece.count);
        if (from < to) visit(piece, from - start, from - begin, to - from);
        start += piece.count;
        if (start >= end) return;
    }
}

// Calls visit(part) for the parts of a range of elements. A rank that ends the generation waits until no rank touches
// its memory: so parts are small, and none begins after the operation was aborted.
template <class Visit>
void in_parts(const HostGroup& group, const Range& range, std::size_t item, Visit&& visit) {
    constexpr std::size_t most = std::size_t{16} << 20;  // bytes
    for (std::uint64_t begin = range.begin; begin < range.end; begin += most / item) {
        if (begin > range.begin && group.stops()) throw Aborted(group.abort_reason());
        visit(Range{begin, std::min(range.end, begin + most / item)});
    }
}

inline void copy_in(const std::vector<Piece>& pieces, std::uint64_t begin, std::uint64_t end, std::byte* to,
                    std::size_t item, CopyFn* copy = std::memcpy) {
    for_range(pieces, begin, end, [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
        copy(to + at * item, piece.input + offset * item, n * item);
    });
}

inline void copy_out(const std::vector<Piece>& pieces, std::uint64_t begin, std::uint64_t end, const std::byte* from,
                     std::size_t item) {
    for_range(pieces, begin, end, [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
        std::memcpy(piece.output + offset * item, from + at * item, n * item);
    });
}

// Both scale factors at once, for operations that commute with them.
inline void scale_outputs(const Request& request, const Header& header) {
    const Scale scale{header.prescale * header.postscale, 1.0, 1};
    if (scale.identity()) return;
    for (const Piece& piece : request.pieces) {
        const void* source = piece.output;
        void* output = piece.output;
        reduce_kernel(header.dtype, ReduceOp::Sum)(&output, 1, &source, 1, piece.count, scale);
    }
}

inline std::uint64_t steps_for(std::uint64_t count, std::uint64_t per_step) {
    return (count + per_step - 1) / per_step;
}

inline bool all_in_ring(const std::vector<Header>& headers, bool outputs) {
    return std::all_of(headers.begin(), headers.end(), [&](const Header& header) {
        return header.kind == OpKind::Join || header.count == 0 ||
               (header.input != kNowhere && (!outputs || header.output != kNowhere));
    });
}

inline bool all_inline(const std::vector<Header>& headers) {
    return std::all_of(headers.begin(), headers.end(),
                       [](const Header& header) { return header.kind == OpKind::Join || header.is_inline != 0; });
}

// The share of a Reduction in an operation: all of it, or between hosts either the sum over the ranks of one host or
// the sum over the hosts.
enum class Share { Whole, OneHost, AllHosts };

// The kernel of a reduction, and the factors to apply after it: the average over `size` ranks, the postscale.
ReduceFn kernel_of(const Header& header);
Scale scale_behind(const Header& header, std::size_t size);

// The reduction of an operation, over the members that have data (all that have not joined).
class Reduction {
   public:
    // `headers` has one header for each input: each member of this host, or each host's result. `size` is the number of
    // ranks that an average divides by.
    Reduction(const std::vector<Header>& headers, const Header& lead, std::size_t size, Share share = Share::Whole);

    // Combines the same `count` elements of every contributing member, found by `source(member)`, into `dst`.
    template <class Source>
    void run(void* const* dst, int dst_count, std::uint64_t count, Source&& source) const {
        if (count == 0) return;
        const void* sources[kMostSources];
        std::vector<const void*> many;
        const void** src = sources;
        if (contributors_.size() > kMostSources) {
            many.resize(contributors_.size());
            src = many.data();
        }
        int n = 0;
        for (int member : contributors_) src[n++] = source(member);
        kernel_(dst, dst_count, src, n, count, scale_);
    }
    const std::vector<int>& contributors() const { return contributors_; }
    // dst = a + b, or the operation's own combination, unscaled.
    void combine(void* dst, const void* a, const void* b, std::uint64_t count) const;
    // Applies the average and the postscale in place, to a result that has been combined with those of all hosts.
    void finish(void* data, std::uint64_t count) const;

   private:
    static constexpr std::size_t kMostSources = 16;
    ReduceFn kernel_;
    Scale scale_;
    Scale finish_;
    std::vector<int> contributors_;
};

// The header that decides the operation: that of the first member that has not joined.
const Header& lead_header(const std::vector<Header>& headers);

// An operation on one host.
class OnOneHost : public GatedAlgorithm {
   protected:
    explicit OnOneHost(const Operation& operation)
        : group_(operation.group),
          request_(operation.request),
          lead_(lead_header(operation.headers)),
          item_(item_size(lead_.dtype)) {}

    const std::byte* mailbox(int member) const { return group_.inline_slot(member, lead_.sequence); }

    HostGroup& group_;
    const Request& request_;
    const Header lead_;
    const std::size_t item_;
};

// Defines the maker of a class, for the table of paths, with the arguments of its constructor.
#define RING_MAKER(maker, Class, ...) \
    std::unique_ptr<Algorithm> maker(const Operation& operation) { return std::make_unique<Class>(__VA_ARGS__); }

MakeAlgorithm make_nothing;

}  // namespace ring
