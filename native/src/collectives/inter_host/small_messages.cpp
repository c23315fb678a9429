// Operations between hosts whose tensors came with the agreement, so that they only have to be read.
#include <cstring>

#include "collectives/inter_host/fabric_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"

namespace ring {
namespace {

class SmallOperation : public BetweenHosts {
   public:
    using Move = void (SmallOperation::*)();
    SmallOperation(const Operation& operation, Move move)
        : BetweenHosts(operation), agreement_(*operation.agreement), move_(move) {}

    Step advance(std::uint64_t) override {
        (this->*move_)();
        return Step::Done;
    }

    void allreduce() { reduce({0, lead_.count}); }
    void reducescatter() { reduce(row_range(lead_.count, lead_.shape[0], fabric_.size(), index_)); }
    void broadcast() { copy_out(request_.pieces, 0, lead_.count, agreement_.payload(request_.root), item_); }
    void allgather() {
        gather([&](int from) { return header(from).count; }, [](int) { return std::uint64_t{0}; });
    }
    void alltoall() {
        gather([&](int from) { return static_cast<std::uint64_t>(agreement_.splits(from)[index_]); },
               [&](int from) {
                   std::uint64_t start = 0;
                   for (int to = 0; to < index_; ++to) start += static_cast<std::uint64_t>(agreement_.splits(from)[to]);
                   return start;
               });
    }

   private:
    // The hosts' sums, added in the order of the hosts on every rank, so that all get the same bits.
    void reduce(const Range& wanted) {
        if (request_.pieces.empty()) return;  // joined
        std::vector<const std::byte*> partials;
        for (int host = 0; host < fabric_.hosts(); ++host) {
            const std::byte* partial = agreement_.partial(host);
            if (partial == nullptr) continue;
            partials.push_back(partial);
        }
        const std::vector<Header> with_data(partials.size(), lead_);
        const Reduction reduction(with_data, lead_, headers_.size(), Share::AllHosts);
        // A reducescatter's output starts at its own rows.
        const std::uint64_t shift = wanted.begin;
        for_range(request_.pieces, wanted.begin, wanted.end,
                  [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
                      const std::uint64_t place = lead_.kind == OpKind::ReduceScatter ? offset - shift : offset;
                      void* dst = piece.output + place * item_;
                      reduction.run(&dst, 1, n, [&](int source) {
                          return partials[static_cast<std::size_t>(source)] + (wanted.begin + at) * item_;
                      });
                  });
    }

    template <class Count, class Start>
    void gather(Count&& count, Start&& start) {
        std::vector<std::int64_t> counts;
        for (int from = 0; from < fabric_.size(); ++from) counts.push_back(static_cast<std::int64_t>(count(from)));
        const std::vector<std::byte*> places = result_.place(request_, std::move(counts), item_);
        for (int from = 0; from < fabric_.size(); ++from) {
            const std::size_t bytes = count(from) * item_;
            std::byte* const to = places[static_cast<std::size_t>(from)];
            if (bytes > 0) std::memcpy(to, agreement_.payload(from) + start(from) * item_, bytes);
        }
    }

    const Agreement& agreement_;
    const Move move_;
};

}  // namespace

RING_MAKER(make_eager_allreduce, SmallOperation, operation, &SmallOperation::allreduce)
RING_MAKER(make_eager_reducescatter, SmallOperation, operation, &SmallOperation::reducescatter)
RING_MAKER(make_eager_broadcast, SmallOperation, operation, &SmallOperation::broadcast)
RING_MAKER(make_eager_allgather, SmallOperation, operation, &SmallOperation::allgather)
RING_MAKER(make_eager_alltoall, SmallOperation, operation, &SmallOperation::alltoall)

}  // namespace ring
