// Adasum among the ranks of several hosts: each rank gathers all tensors and combines them by itself, in the same order
// as on one host. That takes p·S bytes on each rank.
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/fabric_parts.hpp"

namespace ring {
namespace {

class GatheredAdasum : public Algorithm {
   public:
    explicit GatheredAdasum(const Operation& operation)
        : request_(operation.request),
          lead_(operation.headers[0]),
          ranks_(operation.fabric->size()),
          gather_(make_landing_allgather(
              {operation.group, operation.request, operation.headers, gathered_, operation.fabric})) {}

    Step advance(std::uint64_t gates) override {
        const Step step = gather_->advance(gates);
        if (step == Step::Done) combine();
        return step;
    }

   private:
    // Combines ranks 0 and 1, 2 and 3, ..., then the results in pairs, until one is left.
    void combine() {
        const AdasumFn adasum = kernels().adasum[static_cast<int>(lead_.dtype)];
        const std::size_t item = item_size(lead_.dtype);
        const std::size_t bytes = lead_.count * item;
        Result spare;
        spare.allocate(bytes * static_cast<std::size_t>(ranks_) / 2);
        std::byte* from = gathered_.data.get();
        std::byte* to = spare.data.get();
        for (int left = ranks_ / 2; left > 0; left /= 2, std::swap(from, to)) {
            for (std::size_t i = 0; i < static_cast<std::size_t>(left); ++i) {
                std::size_t begin = i * bytes;
                std::size_t pair = 2 * begin;
                for (const Piece& piece : request_.pieces) {  // each has its own direction
                    adasum(to + begin, from + pair, from + pair + bytes, piece.count);
                    begin += piece.count * item;
                    pair += piece.count * item;
                }
            }
        }
        copy_out(request_.pieces, 0, lead_.count, from, item);
        scale_outputs(request_, lead_);
    }

    const Request& request_;
    Header lead_;
    int ranks_;
    Result gathered_;
    std::unique_ptr<Algorithm> gather_;
};

}  // namespace

RING_MAKER(make_gathered_adasum, GatheredAdasum, operation)

}  // namespace ring
