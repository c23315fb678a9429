// Broadcast, allgather and alltoall on one host: operations that move data and do not combine it.
#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

// From the root's mailbox, or from its tensor where that lies in ring memory.
class PullBroadcast : public OnOneHost {
   public:
    PullBroadcast(const Operation& operation, bool is_inline)
        : OnOneHost(operation),
          input_(operation.headers[static_cast<std::size_t>(request_.root)].input),
          inline_(is_inline) {}

    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        const Piece& piece = request_.pieces[0];
        const bool is_root = request_.root == group_.index();
        const std::byte* from = is_root   ? piece.input
                                : inline_ ? mailbox(request_.root)
                                          : group_.ring_memory().at<std::byte>(input_);
        if (piece.output != from && piece.count > 0) std::memcpy(piece.output, from, piece.count * item_);
        return inline_;
    }

   private:
    std::uint64_t input_;  // of the root
    bool inline_;
};

// The root fills segments, the others empty them.   step k:  consume(k-1)  fill(k)
class StagedBroadcast : public OnOneHost {
   public:
    explicit StagedBroadcast(const Operation& operation)
        : OnOneHost(operation), per_step_(group_.segment_bytes() / item_), steps_(steps_for(lead_.count, per_step_)) {}

    bool step(std::uint64_t k) override {
        const Piece& piece = request_.pieces[0];
        const bool is_root = request_.root == group_.index();
        if (is_root) {
            if (k < steps_) copy_in(request_.pieces, begin(k), end(k), group_.segment(request_.root, k), item_);
            if (k == 0 && piece.output != piece.input) std::memcpy(piece.output, piece.input, lead_.count * item_);
        } else if (k > 0) {
            copy_out(request_.pieces, begin(k - 1), end(k - 1), group_.segment(request_.root, k - 1), item_);
        }
        return k == steps_;
    }

   private:
    std::uint64_t begin(std::uint64_t k) const { return k * per_step_; }
    std::uint64_t end(std::uint64_t k) const { return std::min(lead_.count, begin(k + 1)); }

    std::uint64_t per_step_, steps_;
};

// An allgather or alltoall: each rank's part goes to its own place in the result.
class Gathering : public OnOneHost {
   protected:
    Gathering(const Operation& operation, std::vector<std::int64_t> counts)
        : OnOneHost(operation),
          places_(operation.result.place(operation.request, std::move(counts), item_)),
          counts_(operation.result.counts) {}

    std::byte* part(int member) const { return places_[static_cast<std::size_t>(member)]; }
    std::uint64_t count(int member) const {
        return static_cast<std::uint64_t>(counts_[static_cast<std::size_t>(member)]);
    }

   private:
    std::vector<std::byte*> places_;
    std::vector<std::int64_t> counts_;
};

std::vector<std::int64_t> header_counts(const std::vector<Header>& headers) {
    std::vector<std::int64_t> counts;
    for (const Header& header : headers) counts.push_back(static_cast<std::int64_t>(header.count));
    return counts;
}

// Every rank copies its parts from the inputs; a part begins at element `from[member]` of that member's tensor.
class Pull : public Gathering {
   public:
    Pull(const Operation& operation, std::vector<std::int64_t> counts, std::vector<std::uint64_t> from, bool is_inline)
        : Gathering(operation, std::move(counts)),
          headers_(operation.headers),
          from_(std::move(from)),
          inline_(is_inline) {}

    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        for (int member = 0; member < group_.size(); ++member) {
            if (count(member) == 0) continue;
            const auto i = static_cast<std::size_t>(member);
            const std::byte* tensor = inline_ ? mailbox(member) : group_.ring_memory().at<std::byte>(headers_[i].input);
            const std::byte* from = tensor + from_[i] * item_;
            // When FSDP gathers in place, a rank's own part is there already.
            if (from != part(member)) std::memcpy(part(member), from, count(member) * item_);
        }
        return inline_;
    }

   private:
    std::vector<Header> headers_;
    std::vector<std::uint64_t> from_;
    bool inline_;
};

//   step k:  consume(k-1)  fill(k)
class StagedAllgather : public Gathering {
   public:
    explicit StagedAllgather(const Operation& operation)
        : Gathering(operation, header_counts(operation.headers)), per_step_(group_.segment_bytes() / item_) {
        for (const Header& header : operation.headers) steps_ = std::max(steps_, steps_for(header.count, per_step_));
    }

    bool step(std::uint64_t k) override {
        for (int member = 0; k > 0 && member < group_.size(); ++member) {
            const Range range = segment_range(member, k - 1);
            if (range.size() > 0)
                std::memcpy(part(member) + range.begin * item_, group_.segment(member, k - 1), range.size() * item_);
        }
        const Range own = segment_range(group_.index(), k);
        copy_in(request_.pieces, own.begin, own.end, group_.segment(group_.index(), k), item_);
        return k == steps_;
    }

   private:
    Range segment_range(int member, std::uint64_t k) const {
        return {std::min(count(member), k * per_step_), std::min(count(member), (k + 1) * per_step_)};
    }

    std::uint64_t per_step_;
    std::uint64_t steps_ = 0;
};

// The number of elements that each rank sends to each other: row `from`, column `to`.
class SplitTable {
   public:
    SplitTable(const HostGroup& group, std::uint64_t sequence) : size_(group.size()) {
        for (int from = 0; from < size_; ++from)
            table_.insert(table_.end(), group.splits(from, sequence), group.splits(from, sequence) + size_);
    }
    std::uint64_t count(int from, int to) const { return static_cast<std::uint64_t>(table_[index(from, to)]); }
    std::uint64_t start(int from, int to) const {
        std::uint64_t sum = 0;
        for (int i = 0; i < to; ++i) sum += count(from, i);
        return sum;
    }
    std::vector<std::int64_t> column(int to) const {
        std::vector<std::int64_t> counts;
        for (int from = 0; from < size_; ++from) counts.push_back(table_[index(from, to)]);
        return counts;
    }
    std::vector<std::uint64_t> column_starts(int to) const {
        std::vector<std::uint64_t> starts;
        for (int from = 0; from < size_; ++from) starts.push_back(start(from, to));
        return starts;
    }
    std::uint64_t largest() const {
        return static_cast<std::uint64_t>(*std::max_element(table_.begin(), table_.end()));
    }

   private:
    std::size_t index(int from, int to) const { return static_cast<std::size_t>(from * size_ + to); }
    int size_;
    std::vector<std::int64_t> table_;
};

// A segment holds one piece for each rank.   step k:  consume(k-1)  fill(k)
class StagedAlltoall : public Gathering {
   public:
    StagedAlltoall(const Operation& operation, SplitTable splits)
        : Gathering(operation, splits.column(operation.group.index())),
          splits_(std::move(splits)),
          unit_(group_.segment_bytes() / item_ / static_cast<std::size_t>(group_.size())),
          steps_(steps_for(splits_.largest(), unit_)) {}

    bool step(std::uint64_t k) override {
        const int own = group_.index();
        for (int member = 0; k > 0 && member < group_.size(); ++member) {
            const Range range = piece_range(member, own, k - 1);
            if (range.size() > 0)
                std::memcpy(part(member) + range.begin * item_, slot(member, own, k - 1), range.size() * item_);
        }
        for (int member = 0; k < steps_ && member < group_.size(); ++member) {
            const Range range = piece_range(own, member, k);
            const std::uint64_t start = splits_.start(own, member);
            copy_in(request_.pieces, start + range.begin, start + range.end, slot(own, member, k), item_);
        }
        return k == steps_;
    }

   private:
    Range piece_range(int from, int to, std::uint64_t k) const {
        const std::uint64_t all = splits_.count(from, to);
        return {std::min(all, k * unit_), std::min(all, (k + 1) * unit_)};
    }
    std::byte* slot(int from, int to, std::uint64_t k) const {
        return group_.segment(from, k) + static_cast<std::size_t>(to) * unit_ * item_;
    }

    SplitTable splits_;
    std::uint64_t unit_, steps_;
};

std::unique_ptr<Algorithm> pull_allgather(const Operation& operation, bool is_inline) {
    return std::make_unique<Pull>(operation, header_counts(operation.headers),
                                  std::vector<std::uint64_t>(operation.headers.size()), is_inline);
}

SplitTable split_table(const Operation& operation) {
    return SplitTable(operation.group, lead_header(operation.headers).sequence);
}

std::unique_ptr<Algorithm> pull_alltoall(const Operation& operation, bool is_inline) {
    const SplitTable splits = split_table(operation);
    const int own = operation.group.index();
    return std::make_unique<Pull>(operation, splits.column(own), splits.column_starts(own), is_inline);
}

}  // namespace

RING_MAKER(make_one_shot_broadcast, PullBroadcast, operation, true)
RING_MAKER(make_pull_broadcast, PullBroadcast, operation, false)
RING_MAKER(make_staged_broadcast, StagedBroadcast, operation)
std::unique_ptr<Algorithm> make_one_shot_allgather(const Operation& operation) {
    return pull_allgather(operation, true);
}

std::unique_ptr<Algorithm> make_pull_allgather(const Operation& operation) { return pull_allgather(operation, false); }

RING_MAKER(make_staged_allgather, StagedAllgather, operation)
std::unique_ptr<Algorithm> make_one_shot_alltoall(const Operation& operation) { return pull_alltoall(operation, true); }

std::unique_ptr<Algorithm> make_pull_alltoall(const Operation& operation) { return pull_alltoall(operation, false); }

RING_MAKER(make_staged_alltoall, StagedAlltoall, operation, split_table(operation))

}  // namespace ring
