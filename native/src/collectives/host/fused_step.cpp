// The fused optimizer step: reduce-scatter, update and allgather in one pass over ring memory.
#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

constexpr std::uint64_t kBlock = 2048;  // elements: gradients, state and parameters of a block stay in the first level

// The owner of a chunk sums its gradients over all ranks block by block, updates its parameters with state that it
// alone holds, and writes them to all ranks. Of S bytes of parameters it reads p gradients, reads and writes its
// state, and writes p parameters, each S/p: the summed gradient never goes to memory.
class PushStep : public GatedAlgorithm {
   public:
    PushStep(HostGroup& group, const Request& request, const std::vector<Header>& headers)
        : group_(group),
          request_(request),
          headers_(headers),
          reduction_(headers, headers[0], headers.size()),
          update_(kernels().update[static_cast<int>(request.update.rule)]) {}

   protected:
    bool step(std::uint64_t k) override {
        if (k == 1) return true;
        const Range own = chunk_range(headers_[0].count, group_.size(), group_.index(), sizeof(float));
        in_parts(group_, own, sizeof(float), [&](const Range& part) { update(own, part); });
        return false;
    }

   private:
    void update(const Range& own, const Range& part) {
        alignas(64) float gradient[kBlock];
        for (std::uint64_t begin = part.begin; begin < part.end; begin += kBlock) {
            const std::uint64_t n = std::min(kBlock, part.end - begin);
            void* sum = gradient;
            reduction_.run(&sum, 1, n, [&](int member) { return place(member, &Header::input, begin); });
            float* parameter = place(group_.index(), &Header::output, begin);
            const std::uint64_t at = begin - own.begin;
            update_(parameter, gradient, request_.state[0] ? request_.state[0] + at : nullptr,
                    request_.state[1] ? request_.state[1] + at : nullptr, n, request_.update);
            for (int member = 0; member < group_.size(); ++member)
                if (member != group_.index())
                    std::memcpy(place(member, &Header::output, begin), parameter, n * sizeof(float));
        }
    }

    float* place(int member, std::uint64_t Header::* where, std::uint64_t element) const {
        return group_.domain().at<float>(headers_[static_cast<std::size_t>(member)].*where) + element;
    }

    HostGroup& group_;
    const Request& request_;
    std::vector<Header> headers_;
    Reduction reduction_;
    UpdateFn update_;
};

}  // namespace

std::unique_ptr<Algorithm> make_push_step(const Operation& operation) {
    return std::make_unique<PushStep>(operation.group, operation.request, operation.headers);
}

}  // namespace ring
