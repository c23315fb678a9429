// Allreduce by recursive doubling, for sums so small that the number of messages in a row counts, not their bytes.
// Every lane reduces its chunk over the ranks of its host, exchanges the whole of it as `doubling_plan` says, and
// writes the result to all ranks of its host.
#include "collectives/inter_host/fabric_parts.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {
namespace {

class DoublingAllreduce : public ReductionBetweenHosts {
   public:
    explicit DoublingAllreduce(const Operation& operation)
        : ReductionBetweenHosts(operation), plan_(doubling_plan(fabric_.hosts(), fabric_.host())) {
        if (!is_lane()) return;
        chunk_ = lane_chunk();
        sum_.emplace(group_.shared_ring_memory(), std::max<std::size_t>(bytes(), item_));
        landing_ = std::make_shared<std::vector<std::byte>>(bytes());
    }

    Step advance(std::uint64_t gates) override {
        if (gates == 1) return Step::Done;
        if (!sum_) return Step::Gate;
        if (!is_summed_) sum_host(chunk_, sum());
        is_summed_ = true;
        for (; done_ < plan_.size(); ++done_) {
            const Exchange& exchange = plan_[done_];
            if (!transfers_) begin(exchange);
            if (!transfers_->done()) return Step::AwaitsLink;
            transfers_.reset();
            take(exchange);
        }
        if (bytes() > 0) {
            reduction_.finish(sum(), chunk_.size());
            spread(chunk_, sum());
        }
        return Step::Gate;
    }

   private:
    using Kind = Exchange::Kind;
    std::size_t bytes() const { return chunk_.size() * item_; }
    // In ring memory of its own: a link may still read it after an abort.
    std::byte* sum() const { return static_cast<std::byte*>(sum_->data()); }

    void begin(const Exchange& exchange) {
        transfers_.emplace(fabric_, Fabric::kData, landing_);
        const int peer = fabric_.members(exchange.peer)[static_cast<std::size_t>(group_.index())];
        const bool gives = exchange.kind == Kind::Give || exchange.kind == Kind::GiveResult;
        const bool takes = exchange.kind == Kind::Take || exchange.kind == Kind::TakeResult;
        if (!gives) transfers_->receive(peer, landing_->data(), bytes());
        if (!takes) transfers_->send(peer, sum(), bytes());
    }

    void take(const Exchange& exchange) {
        if (bytes() == 0) return;
        const void* theirs = landing_->data();
        if (exchange.kind == Kind::TakeResult) {
            std::memcpy(sum(), theirs, bytes());
        } else if (exchange.kind == Kind::Both || exchange.kind == Kind::Take) {
            const bool is_lower = fabric_.host() < exchange.peer;
            reduction_.combine(sum(), is_lower ? sum() : theirs, is_lower ? theirs : sum(), chunk_.size());
        }
    }

    std::vector<Exchange> plan_;
    Range chunk_{0, 0};
    std::size_t done_ = 0;
    bool is_summed_ = false;
    std::optional<Region> sum_;  // only where this rank is a lane
    std::shared_ptr<std::vector<std::byte>> landing_;
    std::optional<Transfers> transfers_;  // last, so that they are cancelled first
};

}  // namespace

RING_MAKER(make_doubling_allreduce, DoublingAllreduce, operation)

}  // namespace ring
