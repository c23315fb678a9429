// Allreduce of a list of tensors that lie anywhere in ring memory: the owner of a part reads it from all inputs and
// writes the result to all outputs, as for one tensor.
#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

class PushList : public GatedAlgorithm {
   public:
    PushList(HostGroup& group, const std::vector<Header>& headers)
        : group_(group), headers_(headers), lead_(lead_header(headers)), reduction_(headers, lead_, headers.size()) {}

    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        const std::size_t item = item_size(lead_.dtype);
        const Range own = chunk_range(lead_.count, group_.size(), group_.index(), item);
        std::uint64_t start = 0;
        for (int piece = 0; piece < lead_.tensors && start < own.end; ++piece) {
            const std::uint64_t count = listed(reduction_.contributors().front(), piece).count;
            const std::uint64_t begin = std::max(own.begin, start), end = std::min(own.end, start + count);
            if (begin < end) reduce(piece, {begin - start, end - start}, item);
            start += count;
        }
        return false;
    }

   private:
    const ListedPiece& listed(int member, int piece) const {
        return group_.domain().at<ListedPiece>(headers_[static_cast<std::size_t>(member)].input)[piece];
    }

    void reduce(int piece, const Range& range, std::size_t item) {
        if (group_.stops()) throw Aborted(group_.abort_reason());
        in_parts(group_, range, item, [&](const Range& part) {
            const auto place = [&](std::uint64_t offset) {
                if (!group_.domain().contains(offset + part.begin * item, part.size() * item))
                    throw Error("a rank of this host lists a tensor beyond ring memory: its memory is damaged");
                return group_.domain().at(offset + part.begin * item);
            };
            outputs_.clear();
            for (int member : reduction_.contributors()) outputs_.push_back(place(listed(member, piece).output));
            reduction_.run(outputs_.data(), static_cast<int>(outputs_.size()), part.size(),
                           [&](int member) { return place(listed(member, piece).input); });
        });
    }

    HostGroup& group_;
    std::vector<Header> headers_;
    Header lead_;
    Reduction reduction_;
    std::vector<void*> outputs_;
};

}  // namespace

std::unique_ptr<Algorithm> make_push_list(const Operation& operation) {
    return std::make_unique<PushList>(operation.group, operation.headers);
}

}  // namespace ring
