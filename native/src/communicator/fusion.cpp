#include "ring/communicator/fusion.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/group/mismatch.hpp"

namespace ring {
namespace {

// From this size in bytes on, an operation that needs no copy gains nothing by sharing its gates.
constexpr std::uint64_t kLarge = 64 << 10;

std::uint64_t bytes_of(const Header& header) { return header.count * item_size(header.dtype); }

bool fuses(const std::vector<Header>& headers, const std::vector<int>& ranks, std::uint64_t threshold) {
    const Header& lead = lead_header(headers);
    if (lead.kind != OpKind::Allreduce || lead.op == ReduceOp::Adasum) return false;
    if (bytes_of(lead) > threshold) return false;
    if (bytes_of(lead) >= kLarge && all_in_ring(headers, true)) return false;
    return find_mismatch(headers, ranks).empty();
}

// The same ranks must have joined in both; otherwise the fused tensor of a rank would have gaps.
bool together(const std::vector<Header>& first, const std::vector<Header>& second) {
    const Header& a = lead_header(first);
    const Header& b = lead_header(second);
    const auto same_part = [](const Header& one, const Header& other) { return one.kind == other.kind; };
    return a.device == b.device && a.dtype == b.dtype && a.op == b.op && a.wire == b.wire &&
           std::memcmp(&a.prescale, &b.prescale, sizeof a.prescale) == 0 &&
           std::memcmp(&a.postscale, &b.postscale, sizeof a.postscale) == 0 &&
           std::equal(first.begin(), first.end(), second.begin(), same_part);
}

}  // namespace

std::vector<std::vector<std::size_t>> plan_fusion(const std::vector<Ready>& ready, const std::vector<int>& ranks,
                                                  std::uint64_t threshold) {
    struct Open {
        std::size_t first;      // index in `ready`
        std::size_t operation;  // index in the result
        std::uint64_t bytes;
    };
    std::vector<std::vector<std::size_t>> operations;
    std::vector<Open> open;  // at most one for each kind of sum
    for (std::size_t i = 0; i < ready.size(); ++i) {
        const Header& lead = lead_header(ready[i].headers);
        if (!fuses(ready[i].headers, ranks, threshold)) {
            operations.push_back({i});
            continue;
        }
        const auto found = std::find_if(open.begin(), open.end(), [&](const Open& one) {
            return together(ready[one.first].headers, ready[i].headers);
        });
        if (found != open.end() && found->bytes + bytes_of(lead) <= threshold) {
            operations[found->operation].push_back(i);
            found->bytes += bytes_of(lead);
            continue;
        }
        operations.push_back({i});
        const Open next{i, operations.size() - 1, bytes_of(lead)};
        if (found != open.end()) {
            *found = next;
        } else {
            open.push_back(next);
        }
    }
    return operations;
}

}  // namespace ring
