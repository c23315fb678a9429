// Adasum among the ranks of one host: log2(p) rounds in which groups of ranks are combined in pairs.
// p is a power of two: `make_work.cpp` refuses other numbers.
#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

// Every rank has two copies of the fused tensor in ring memory, one after the other. In round k, ranks that differ only
// in their lowest k bits hold the same vector. Each combines it with the vector of the rank that differs in bit k, the
// lower group's first, so that all get the same bits. It reads from one copy and writes to the other.
class AdasumAllreduce : public OnOneHost {
   public:
    explicit AdasumAllreduce(const Operation& operation)
        : OnOneHost(operation),
          headers_(operation.headers),
          combine_(kernels().adasum[static_cast<int>(lead_.dtype)]) {}

   protected:
    bool step(std::uint64_t k) override {
        const int distance = 1 << k;
        if (distance >= group_.size()) {
            copy_out(request_.pieces, 0, lead_.count, copy(group_.index(), k), item_);
            scale_outputs(request_, lead_);
            return true;
        }
        const int lower = group_.index() & ~distance;
        const std::byte* left = copy(lower, k);
        const std::byte* right = copy(lower | distance, k);
        std::byte* out = copy(group_.index(), k + 1);
        // Each tensor of a fused operation has its own direction.
        std::uint64_t begin = 0;
        for (const Piece& piece : request_.pieces) {
            combine_(out + begin * item_, left + begin * item_, right + begin * item_, piece.count);
            begin += piece.count;
        }
        return false;
    }

   private:
    std::byte* copy(int member, std::uint64_t round) const {
        const std::uint64_t second = round % 2 * lead_.count * item_;
        return group_.ring_memory().at<std::byte>(headers_[static_cast<std::size_t>(member)].input + second);
    }

    std::vector<Header> headers_;
    AdasumFn combine_;
};

}  // namespace

RING_MAKER(make_adasum, AdasumAllreduce, operation)

}  // namespace ring
