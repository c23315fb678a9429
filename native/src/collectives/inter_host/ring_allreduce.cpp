// The hierarchical ring: every lane reduces its chunk over the ranks of its host, sends it around the ring of hosts,
// and writes complete pieces to all ranks of its host, all of it segment by segment.
//
// Message m = (hop t, segment j) with m = t·n + j. Messages leave and arrive in this order, so they need no numbers.
// Segment j of hop t+1 can leave as soon as segment j of hop t has arrived and been added, n segments later.
//
// Sums are rounded on the wire, but added in float32. The host that completes a piece rounds its own copy too, so that
// all ranks end with the same bits.
#include "collectives/inter_host/fabric_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {
namespace {

class RingAllreduce : public ReductionBetweenHosts {
   public:
    explicit RingAllreduce(const Operation& operation)
        : ReductionBetweenHosts(operation),
          wire_item_(lead_.dtype == DType::Float32 ? item_size(lead_.wire) : item_),
          plan_(ring_plan(fabric_.hosts(), fabric_.host())) {
        if (!is_lane()) return;
        chunk_ = lane_chunk();
        per_segment_ = Window::kMostBytes / item_;
        std::uint64_t longest = 0;
        for (int piece = 0; piece < fabric_.hosts(); ++piece) longest = std::max(longest, piece_range(piece).size());
        segments_ = std::max<std::uint64_t>(1, steps_for(longest, per_segment_));
        const std::uint64_t messages = plan_.size() * segments_;
        window_.emplace(fabric_, neighbour(-1), neighbour(1), messages, messages);
        if (narrows()) {
            outgoing_.emplace(group_.shared_ring_memory(), Window::kInFlight * Window::kMostBytes);
            widened_.resize(per_segment_);
        }
        // A joined rank has no tensor of its own, but reduces its chunk for the other ranks of its host.
        if (header(index_).output == kNowhere) scratch_.emplace(group_.shared_ring_memory(), lead_.count * item_);
    }

    Step advance(std::uint64_t gates) override {
        if (gates == 1) return Step::Done;
        if (!window_) return Step::Gate;
        bool moved = false;
        while (round()) moved = true;
        if (window_->done()) return Step::Gate;
        return moved ? Step::Moved : Step::AwaitsLink;
    }

   private:
    std::byte* own() const { return scratch_ ? static_cast<std::byte*>(scratch_->data()) : output(index_); }
    std::byte* own(const Range& range) const { return own() + range.begin * item_; }

    Range piece_range(int piece) const {
        const Range part = chunk_range(chunk_.size(), fabric_.hosts(), piece, item_);
        return {chunk_.begin + part.begin, chunk_.begin + part.end};
    }
    Range segment_range(int piece, std::uint64_t segment) const {
        const Range all = piece_range(piece);
        return {std::min(all.end, all.begin + segment * per_segment_),
                std::min(all.end, all.begin + (segment + 1) * per_segment_)};
    }
    Range sends(std::uint64_t m) const { return segment_range(plan_[m / segments_].send, m % segments_); }
    Range receives(std::uint64_t m) const { return segment_range(plan_[m / segments_].receive, m % segments_); }

    bool narrows() const { return wire_item_ != item_; }
    void narrow(const Range& range, void* to) const {
        kernels().narrow[static_cast<int>(lead_.wire)](to, floats(range), range.size());
    }
    void widen(const void* from, const Range& range, float* to) const {
        kernels().widen[static_cast<int>(lead_.wire)](to, from, range.size());
    }
    float* floats(const Range& range) const { return reinterpret_cast<float*>(own(range)); }

    // Tries every possible action once; false when none was possible.
    bool round() {
        bool moved = window_->ask([this](std::uint64_t m) { return receives(m).size() * wire_item_; });
        if (may_take(window_->taken()) && window_->has_come()) {
            take(window_->taken());
            window_->take();
            moved = true;
        }
        moved |= send();
        moved |= window_->look_at_sends();
        return moved;
    }

    // A complete piece replaces the data that this host sent; that must have left first.
    bool may_take(std::uint64_t m) const {
        const Hop& hop = plan_[std::min(m / segments_, plan_.size() - 1)];
        return hop.reduce || narrows() || has_left(hop.receive, m % segments_);
    }

    bool has_left(int piece, std::uint64_t segment) const {
        for (std::uint64_t hop = 0; hop < plan_.size() / 2; ++hop)
            if (plan_[hop].send == piece) return window_->sent() > hop * segments_ + segment;
        return true;
    }

    bool send() {
        bool any = false;
        for (; window_->may_send(); any = true) {
            const std::uint64_t m = window_->started();
            const std::uint64_t hop = m / segments_;
            if (hop > 0 && window_->taken() <= m - segments_) break;  // the segment to forward has not arrived
            const Range range = sends(m);
            if (hop == 0) sum_host(range, own(range));
            std::byte* from = own(range);
            if (narrows()) {
                from = static_cast<std::byte*>(outgoing_->data()) + m % Window::kInFlight * Window::kMostBytes;
                narrow(range, from);
            }
            window_->send(from, range.size() * wire_item_);
        }
        return any;
    }

    void take(std::uint64_t m) {
        const std::uint64_t hop = m / segments_;
        const Range range = receives(m);
        if (range.size() == 0) return;
        if (plan_[hop].reduce) {
            std::byte* place = own(range);
            sum_host(range, place);
            const void* theirs = window_->landing(m);
            if (narrows()) {
                widen(theirs, range, widened_.data());
                theirs = widened_.data();
            }
            reduction_.combine(place, place, theirs, range.size());
            if (hop + 1 < plan_.size() / 2) return;
            reduction_.finish(place, range.size());  // the last host to add has the sum over all
            if (narrows()) {
                narrow(range, window_->landing(m));
                widen(window_->landing(m), range, floats(range));
            }
        } else if (narrows()) {
            widen(window_->landing(m), range, floats(range));
        } else {
            std::memcpy(own(range), window_->landing(m), range.size() * item_);
        }
        spread(range, own(range));
    }

    std::size_t wire_item_;
    std::vector<Hop> plan_;
    Range chunk_{0, 0};
    std::uint64_t per_segment_ = 1;
    std::uint64_t segments_ = 0;
    std::optional<Region> scratch_;
    std::optional<Region> outgoing_;  // rounded data; in ring memory, because a link may read it after an abort
    std::vector<float> widened_;
    std::optional<Window> window_;  // only where this rank is a lane; last, so that it is cancelled first
};

}  // namespace

RING_MAKER(make_ring_allreduce, RingAllreduce, operation)

}  // namespace ring
