// Broadcast, reducescatter, allgather and alltoall between hosts, for tensors too large to travel with the agreement.
// All inputs lie in ring memory: before it posts the operation, the communicator copies ordinary tensors there, and
// small ones to the mailbox. All data that is sent lies there too, because a link may read it after an abort.
#include <cstring>
#include <deque>

#include "collectives/inter_host/fabric_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"

namespace ring {
namespace {

// A chain of hosts that begins at the root's. Every lane forwards its chunk segment by segment, so the last host gets
// its first segment h-1 segments late and the whole tensor after S/link + (h-1) segments.
class ChainBroadcast : public BetweenHosts {
   public:
    explicit ChainBroadcast(const Operation& operation) : BetweenHosts(operation) {
        if (!is_lane()) return;
        const int hosts = fabric_.hosts();
        const int position = (fabric_.host() - fabric_.host_of(request_.root) + hosts) % hosts;
        is_first_ = position == 0;
        chunk_ = lane_chunk();
        segments_ = steps_for(chunk_.size(), Window::kMostBytes / item_);
        window_.emplace(fabric_, neighbour(-1), neighbour(1), is_first_ ? 0 : segments_,
                        position == hosts - 1 ? 0 : segments_);
    }

    Step advance(std::uint64_t gates) override {
        if (gates == 1) return Step::Done;
        if (!window_) return Step::Gate;
        bool moved = false;
        while (round()) moved = true;
        if (window_->done() && spread_ == segments_) return Step::Gate;
        return moved ? Step::Moved : Step::AwaitsLink;
    }

   private:
    std::byte* source() const { return is_first_ ? input(request_.root) : output(index_); }
    std::uint64_t here_so_far() const { return is_first_ ? segments_ : window_->taken(); }
    Range segment(std::uint64_t s) const {
        const std::uint64_t n = Window::kMostBytes / item_;
        return {std::min(chunk_.end, chunk_.begin + s * n), std::min(chunk_.end, chunk_.begin + (s + 1) * n)};
    }

    bool round() {
        bool moved = window_->ask([this](std::uint64_t m) { return segment(m).size() * item_; });
        if (window_->has_come()) {
            const Range range = segment(window_->taken());
            std::memcpy(source() + range.begin * item_, window_->landing(window_->taken()), range.size() * item_);
            window_->take();
            moved = true;
        }
        for (; window_->may_send() && window_->started() < here_so_far(); moved = true) {
            const Range range = segment(window_->started());
            window_->send(source() + range.begin * item_, range.size() * item_);
        }
        moved |= window_->look_at_sends();
        if (spread_ < here_so_far()) {
            const Range range = segment(spread_++);
            spread(range, source() + range.begin * item_);
            moved = true;
        }
        return moved;
    }

    bool is_first_ = false;  // of the chain
    Range chunk_{0, 0};
    std::uint64_t segments_ = 0, spread_ = 0;
    std::optional<Window> window_;  // only where this rank is a lane
};

// For every rank, one rank of each other host sums that rank's rows over its host and sends the sum.
class PairwiseReduceScatter : public ReductionBetweenHosts {
   public:
    explicit PairwiseReduceScatter(const Operation& operation)
        : ReductionBetweenHosts(operation), transfers_(fabric_, Fabric::kData, sums_) {}

    Step advance(std::uint64_t gates) override {
        if (gates == 1) return Step::Done;
        if (!started_) start();
        if (!transfers_.done()) return Step::AwaitsLink;
        combine();
        return Step::Gate;
    }

   private:
    Range rows(int index) const { return row_range(lead_.count, lead_.shape[0], fabric_.size(), index); }

    std::byte* add_host_sum(const Range& range) {
        std::byte* sum = add_sum(range.size() * item_);
        sum_host(range, sum);
        return sum;
    }

    std::byte* add_sum(std::size_t bytes) {
        sums_->emplace_back(group_.shared_ring_memory(), bytes);
        return static_cast<std::byte*>(sums_->back().data());
    }

    void start() {
        started_ = true;
        for (int host = 0; host < fabric_.hosts(); ++host) {
            if (host == fabric_.host()) {
                partials_.push_back(add_host_sum(rows(index_)));
                continue;
            }
            partials_.push_back(add_sum(rows(index_).size() * item_));
            transfers_.receive(agent(host, index_), partials_.back(), rows(index_).size() * item_);
            for (int target : fabric_.members(host))
                if (agent(fabric_.host(), target) == index_)
                    transfers_.send(target, add_host_sum(rows(target)), rows(target).size() * item_);
        }
    }

    void combine() {
        const std::vector<Header> with_data(partials_.size(), lead_);
        const Reduction reduction(with_data, lead_, headers_.size(), Share::AllHosts);
        void* dst = request_.pieces[0].output;
        reduction.run(&dst, 1, rows(index_).size(),
                      [&](int host) { return partials_[static_cast<std::size_t>(host)]; });
    }

    bool started_ = false;
    std::shared_ptr<std::deque<Region>> sums_ = std::make_shared<std::deque<Region>>();
    std::vector<std::byte*> partials_;
    Transfers transfers_;  // last, so that it is cancelled before the memory is freed
};

// Every rank sends its tensor to one rank of each other host, which receives it into ring memory for all of its host.
class LandingAllgather : public BetweenHosts {
   public:
    explicit LandingAllgather(const Operation& operation)
        : BetweenHosts(operation), transfers_(fabric_, Fabric::kData, landed_) {}

    Step advance(std::uint64_t gates) override {
        if (gates == 2) return Step::Done;
        if (gates == 1) {
            copy_all();
            return Step::Gate;  // received tensors are freed when all ranks have copied them
        }
        if (!started_) start();
        return transfers_.done() ? Step::Gate : Step::AwaitsLink;
    }

   private:
    std::size_t bytes(int index) const { return header(index).count * item_; }

    void start() {
        started_ = true;
        for (int host = 0; host < fabric_.hosts(); ++host) {
            if (host == fabric_.host()) continue;
            transfers_.send(agent(host, index_), input(index_), bytes(index_));
            for (int from : fabric_.members(host)) {
                if (agent(fabric_.host(), from) != index_ || bytes(from) == 0) continue;
                landed_->emplace_back(group_.shared_ring_memory(), bytes(from));
                landing_places(group_)[from] = group_.ring_memory().offset_of(landed_->back().data(), bytes(from));
                transfers_.receive(from, landed_->back().data(), bytes(from));
            }
        }
    }

    void copy_all() {
        std::vector<std::int64_t> counts;
        for (int from = 0; from < fabric_.size(); ++from)
            counts.push_back(static_cast<std::int64_t>(header(from).count));
        const std::vector<std::byte*> places = result_.place(request_, std::move(counts), item_);
        for (int from = 0; from < fabric_.size(); ++from) {
            const bool is_here = fabric_.host_of(from) == fabric_.host();
            if (bytes(from) == 0) continue;
            const std::byte* tensor =
                is_here ? input(from) : group_.ring_memory().at<std::byte>(landing_places(group_)[from]);
            std::byte* const out = places[static_cast<std::size_t>(from)];
            if (tensor == out) continue;
            in_parts(group_, {0, bytes(from)}, 1,
                     [&](const Range& part) { std::memcpy(out + part.begin, tensor + part.begin, part.size()); });
        }
    }

    bool started_ = false;
    std::shared_ptr<std::deque<Region>> landed_ = std::make_shared<std::deque<Region>>();
    Transfers transfers_;
};

// Every rank sends to every rank of the other hosts, and reads from those of its own.
class PairwiseAlltoall : public BetweenHosts {
   public:
    explicit PairwiseAlltoall(const Operation& operation) : BetweenHosts(operation), agreement_(*operation.agreement) {}

    Step advance(std::uint64_t gates) override {
        if (gates == 1) return Step::Done;
        if (!started_) start();
        if (!transfers_->done()) return Step::AwaitsLink;
        for (const auto& [from, landed, size] : landed_)
            std::memcpy(places_[static_cast<std::size_t>(from)], landed, size);
        return Step::Gate;
    }

   private:
    struct Landed {
        int from;
        const std::byte* data;
        std::size_t bytes;
    };
    std::size_t bytes(int from, int to) const { return static_cast<std::size_t>(agreement_.splits(from)[to]) * item_; }
    std::size_t start_of(int from, int to) const {
        std::size_t sum = 0;
        for (int i = 0; i < to; ++i) sum += bytes(from, i);
        return sum;
    }

    void start() {
        started_ = true;
        std::vector<std::int64_t> counts;
        std::size_t remote = 0;
        for (int from = 0; from < fabric_.size(); ++from) {
            counts.push_back(agreement_.splits(from)[index_]);
            if (fabric_.host_of(from) != fabric_.host()) remote += bytes(from, index_);
        }
        places_ = result_.place(request_, std::move(counts), item_);
        // A link may still write when the caller's tensors are gone, so it does not write into them.
        std::shared_ptr<std::byte[]> landing;
        if (result_.placed) landing.reset(new std::byte[remote]);
        transfers_.emplace(
            fabric_, Fabric::kData,
            result_.placed ? std::shared_ptr<const void>(landing) : std::shared_ptr<const void>(result_.data));
        std::byte* next = landing.get();
        for (int peer = 0; peer < fabric_.size(); ++peer) {
            const std::size_t incoming = bytes(peer, index_);
            std::byte* const place = places_[static_cast<std::size_t>(peer)];
            if (fabric_.host_of(peer) == fabric_.host()) {
                if (incoming > 0) std::memcpy(place, input(peer) + start_of(peer, index_), incoming);
                continue;
            }
            if (result_.placed && incoming > 0) landed_.push_back({peer, next, incoming});
            transfers_->receive(peer, result_.placed ? next : place, incoming);
            transfers_->send(peer, input(index_) + start_of(index_, peer), bytes(index_, peer));
            if (result_.placed) next += incoming;
        }
    }

    const Agreement& agreement_;
    bool started_ = false;
    std::vector<std::byte*> places_;
    std::vector<Landed> landed_;  // on its way to the targets of the request
    std::optional<Transfers> transfers_;
};

}  // namespace

RING_MAKER(make_chain_broadcast, ChainBroadcast, operation)
RING_MAKER(make_pairwise_reducescatter, PairwiseReduceScatter, operation)
RING_MAKER(make_landing_allgather, LandingAllgather, operation)
RING_MAKER(make_pairwise_alltoall, PairwiseAlltoall, operation)

}  // namespace ring
