// Helpers of the algorithms between hosts.
#pragma once

#include <optional>
#include <vector>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/collectives/inter_host/fabric.hpp"

namespace ring {

// An operation between hosts: this rank's place in the group, and where tensors lie.
class BetweenHosts : public Algorithm {
   protected:
    explicit BetweenHosts(const Operation& operation)
        : group_(operation.group),
          fabric_(*operation.fabric),
          request_(operation.request),
          headers_(operation.headers),
          result_(operation.result),
          lead_(lead_header(headers_)),
          item_(item_size(lead_.dtype)),
          index_(here()[static_cast<std::size_t>(group_.index())]) {}

    const std::vector<int>& here() const { return fabric_.members(fabric_.host()); }
    const Header& header(int index) const { return headers_[static_cast<std::size_t>(index)]; }
    // The input of a rank of this host, in its mailbox where it is small: sizes may differ by rank.
    std::byte* input(int index) const {
        const Header& own = header(index);
        return own.is_inline != 0 ? group_.inline_slot(fabric_.local_index(index), own.sequence)
                                  : group_.ring_memory().at<std::byte>(own.input);
    }
    // Where a rank of this host wants the whole result, unless its tensor is small: maybe in memory from which its own
    // tensors are overwritten at the end.
    std::byte* output(int index) const { return group_.ring_memory().at<std::byte>(header(index).output); }
    // The rank of `host` that handles the tensor of a rank of another host.
    int agent(int host, int index) const {
        const std::vector<int>& members = fabric_.members(host);
        return members[static_cast<std::size_t>(fabric_.local_index(index)) % members.size()];
    }
    // Copies these elements, which this rank has, to the outputs of all ranks of this host that have not joined.
    void spread(const Range& range, const std::byte* from) const {
        for (int member : here()) {
            if (header(member).kind == OpKind::Join) continue;
            std::byte* to = output(member) + range.begin * item_;
            if (to != from) std::memcpy(to, from, range.size() * item_);
        }
    }

    // The elements that a lane carries between the hosts; other ranks carry none.
    bool is_lane() const { return group_.index() < fabric_.lanes(); }
    Range lane_chunk() const { return chunk_range(lead_.count, fabric_.lanes(), group_.index(), item_); }
    // The member of the next host (1) or of the one before (-1) in the ring of hosts that has this lane.
    int neighbour(int step) const {
        const int host = (fabric_.host() + fabric_.hosts() + step) % fabric_.hosts();
        return fabric_.members(host)[static_cast<std::size_t>(group_.index())];
    }

    HostGroup& group_;
    const Fabric& fabric_;
    const Request& request_;
    const std::vector<Header>& headers_;  // of the agreement, which outlives this object
    Result& result_;
    const Header lead_;
    const std::size_t item_;
    const int index_;
};

// One that first combines what the ranks of a host have.
class ReductionBetweenHosts : public BetweenHosts {
   protected:
    explicit ReductionBetweenHosts(const Operation& operation)
        : BetweenHosts(operation), reduction_(local_headers(), lead_, headers_.size(), Share::OneHost) {}

    // Leaves the sum over this host's ranks at `to`; zeros where all of them have joined.
    void sum_host(const Range& range, std::byte* to) const {
        if (reduction_.contributors().empty()) {
            std::memset(to, 0, range.size() * item_);
            return;
        }
        in_parts(group_, range, item_, [&](const Range& part) {
            void* place = to + (part.begin - range.begin) * item_;
            reduction_.run(&place, 1, part.size(), [&](int member) {
                return input(here()[static_cast<std::size_t>(member)]) + part.begin * item_;
            });
        });
    }

   private:
    std::vector<Header> local_headers() const {
        std::vector<Header> local;
        for (int member : here()) local.push_back(header(member));
        return local;
    }

   protected:
    const Reduction reduction_;
};

MakeAlgorithm make_landing_allgather;

}  // namespace ring
