// Allreduce and reducescatter on one host.
#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

class HostReduction : public OnOneHost {
   public:
    explicit HostReduction(const Operation& operation)
        : OnOneHost(operation), reduction_(operation.headers, lead_, operation.headers.size()) {}

   protected:
    Range own_chunk() const { return chunk_range(lead_.count, group_.size(), group_.index(), item_); }

    const Reduction reduction_;
};

// A reduction of tensors that lie in ring memory.
class RingMemoryReduction : public HostReduction {
   public:
    explicit RingMemoryReduction(const Operation& operation) : HostReduction(operation), headers_(operation.headers) {}

   protected:
    // An element of what a member's header points to.
    std::byte* place(int member, std::uint64_t Header::* where, std::uint64_t element) const {
        return group_.ring_memory().at<std::byte>(headers_[static_cast<std::size_t>(member)].*where) + element * item_;
    }

   private:
    const std::vector<Header> headers_;
};

// A group of one rank only applies the scale factors.
class LocalAllreduce : public HostReduction {
   public:
    using HostReduction::HostReduction;

    bool step(std::uint64_t) override {
        for (const Piece& piece : request_.pieces) {
            void* dst = piece.output;
            reduction_.run(&dst, 1, piece.count, [&](int) { return piece.input; });
        }
        return true;
    }
};

class OneShotAllreduce : public HostReduction {
   public:
    using HostReduction::HostReduction;

    bool step(std::uint64_t) override {
        for_range(request_.pieces, 0, lead_.count,
                  [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
                      void* dst = piece.output + offset * item_;
                      reduction_.run(&dst, 1, n, [&](int member) { return mailbox(member) + at * item_; });
                  });
        return true;
    }
};

// The owner of a chunk reads it from all inputs and writes the result to all outputs.
class PushAllreduce : public RingMemoryReduction {
   public:
    using RingMemoryReduction::RingMemoryReduction;

    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        std::vector<void*> outputs;
        in_parts(group_, own_chunk(), item_, [&](const Range& part) {
            outputs.clear();
            for (int member : reduction_.contributors()) outputs.push_back(place(member, &Header::output, part.begin));
            reduction_.run(outputs.data(), static_cast<int>(outputs.size()), part.size(),
                           [&](int member) { return place(member, &Header::input, part.begin); });
        });
        return false;
    }
};

// Each rank reduces its chunk of every segment. It reads its own input in place, so that only the others' chunks pass
// through ring memory: 4(p-1)/p + 1 + 2/p bytes per byte, all but two of them in the cache.
//   step k:  spread(k-2)  reduce(k-1)  fill(k)
class StagedAllreduce : public HostReduction {
   public:
    explicit StagedAllreduce(const Operation& operation)
        : HostReduction(operation),
          per_step_(group_.segment_bytes() / item_),
          steps_(steps_for(lead_.count, per_step_)),
          past_cache_(group_.staging().past_cache(lead_.count * item_)) {}

    bool step(std::uint64_t k) override {
        if (k == 0) begin_ = monotonic_ns();
        if (k >= 2) spread(k - 2);
        if (k >= 1 && k <= steps_) reduce(k - 1);
        if (k < steps_) fill(k);
        if (k <= steps_) return false;
        group_.staging().took(past_cache_, lead_.count * item_, monotonic_ns() - begin_);
        return true;
    }

   private:
    // A member's chunk of segment k, as a range of the whole tensor.
    Range chunk(std::uint64_t k, int member) const {
        const std::uint64_t begin = k * per_step_;
        const Range part = chunk_range(std::min(lead_.count - begin, per_step_), group_.size(), member, item_);
        return {begin + part.begin, begin + part.end};
    }
    std::byte* place(std::uint64_t k, int member, std::uint64_t element) const {
        return group_.segment(member, k) + (element - k * per_step_) * item_;
    }

    void fill(std::uint64_t k) {
        for (int member = 0; member < group_.size(); ++member) {
            if (member == group_.index()) continue;
            const Range part = chunk(k, member);
            copy_in(request_.pieces, part.begin, part.end, place(k, group_.index(), part.begin), item_,
                    past_cache_ ? stream_copy : std::memcpy);
        }
    }

    void reduce(std::uint64_t k) {
        const Range own = chunk(k, group_.index());
        if (request_.pieces.empty()) {  // joined: adds nothing, but reduces its chunk for the others
            void* dst = place(k, group_.index(), own.begin);
            reduction_.run(&dst, 1, own.size(), [&](int member) { return place(k, member, own.begin); });
            return;
        }
        for_range(request_.pieces, own.begin, own.end,
                  [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
                      void* dst[] = {piece.output + offset * item_, place(k, group_.index(), own.begin + at)};
                      reduction_.run(dst, past_cache_ ? 1 : 2, n, [&](int member) -> const std::byte* {
                          return member == group_.index() ? piece.input + offset * item_
                                                          : place(k, member, own.begin + at);
                      });
                      if (past_cache_) stream_copy(dst[1], dst[0], n * item_);
                  });
    }

    void spread(std::uint64_t k) {
        for (int member = 0; member < group_.size(); ++member) {
            if (member == group_.index()) continue;
            const Range part = chunk(k, member);
            copy_out(request_.pieces, part.begin, part.end, place(k, member, part.begin), item_);
        }
    }

    std::uint64_t per_step_, steps_;
    bool past_cache_;
    std::int64_t begin_ = 0;
};

// Each rank reduces its rows from all inputs, which lie in ring memory or in the mailboxes.
class PullReduceScatter : public RingMemoryReduction {
   public:
    PullReduceScatter(const Operation& operation, bool is_inline)
        : RingMemoryReduction(operation), inline_(is_inline) {}

    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        const Range own = row_range(lead_.count, lead_.shape[0], group_.size(), group_.index());
        void* dst = request_.pieces[0].output;
        reduction_.run(&dst, 1, own.size(), [&](int member) {
            return inline_ ? mailbox(member) + own.begin * item_ : place(member, &Header::input, own.begin);
        });
        return inline_;
    }

   private:
    bool inline_;
};

// A segment holds one sub-chunk for each rank.   step k:  reduce(k-1)  fill(k)
class StagedReduceScatter : public HostReduction {
   public:
    explicit StagedReduceScatter(const Operation& operation)
        : HostReduction(operation),
          unit_(group_.segment_bytes() / item_ / static_cast<std::size_t>(group_.size())),
          steps_(steps_for(rows(0).size(), unit_)) {}

    bool step(std::uint64_t k) override {
        if (k > 0) reduce(k - 1);
        if (k < steps_) {
            for (int member = 0; member < group_.size(); ++member) {
                if (member == group_.index()) continue;
                const Range part = sub_chunk(member, k);
                copy_in(request_.pieces, part.begin, part.end, slot(group_.index(), member, k), item_);
            }
        }
        return k == steps_;
    }

   private:
    Range rows(int member) const { return row_range(lead_.count, lead_.shape[0], group_.size(), member); }
    Range sub_chunk(int member, std::uint64_t k) const {
        const Range all = rows(member);
        return {std::min(all.end, all.begin + k * unit_), std::min(all.end, all.begin + (k + 1) * unit_)};
    }
    std::byte* slot(int from, int to, std::uint64_t k) const {
        return group_.segment(from, k) + static_cast<std::size_t>(to) * unit_ * item_;
    }

    void reduce(std::uint64_t k) {
        const Range part = sub_chunk(group_.index(), k);
        void* dst = request_.pieces[0].output + (part.begin - rows(group_.index()).begin) * item_;
        const std::byte* own = request_.pieces[0].input + part.begin * item_;
        reduction_.run(&dst, 1, part.size(),
                       [&](int member) { return member == group_.index() ? own : slot(member, group_.index(), k); });
    }

    std::uint64_t unit_, steps_;
};

}  // namespace

RING_MAKER(make_local_allreduce, LocalAllreduce, operation)
RING_MAKER(make_one_shot_allreduce, OneShotAllreduce, operation)
RING_MAKER(make_push_allreduce, PushAllreduce, operation)
RING_MAKER(make_staged_allreduce, StagedAllreduce, operation)
RING_MAKER(make_one_shot_reducescatter, PullReduceScatter, operation, true)
RING_MAKER(make_pull_reducescatter, PullReduceScatter, operation, false)
RING_MAKER(make_staged_reducescatter, StagedReduceScatter, operation)

}  // namespace ring
