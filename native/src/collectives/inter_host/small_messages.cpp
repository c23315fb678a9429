// Operations between hosts whose tensors came with the agreement, so that they only have to be read.
#include <cstring>

#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/fabric_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"

namespace ring {
namespace {

class SmallOperation : public Algorithm {
   public:
    SmallOperation(HostGroup& group, Fabric& fabric, const Request& request, const Agreement& agreement, Result& result)
        : fabric_(fabric), request_(request), agreement_(agreement), result_(result), headers_(agreement.headers()) {
        index_ = fabric.members(fabric.host())[static_cast<std::size_t>(group.index())];
    }

    Step advance(std::uint64_t) override {
        const Header& lead = lead_header(headers_);
        switch (lead.kind) {
            case OpKind::Allreduce:
                reduce(lead, {0, lead.count});
                break;
            case OpKind::ReduceScatter:
                reduce(lead, row_range(lead.count, lead.shape[0], fabric_.size(), index_));
                break;
            case OpKind::Broadcast:
                copy_out(request_.pieces, 0, lead.count, agreement_.payload(request_.root), item_size(lead.dtype));
                break;
            case OpKind::Allgather:
                gather(
                    lead, [&](int from) { return headers_[static_cast<std::size_t>(from)].count; },
                    [](int) { return std::uint64_t{0}; });
                break;
            case OpKind::Alltoall:
                gather(
                    lead, [&](int from) { return static_cast<std::uint64_t>(agreement_.splits(from)[index_]); },
                    [&](int from) {
                        std::uint64_t start = 0;
                        for (int to = 0; to < index_; ++to)
                            start += static_cast<std::uint64_t>(agreement_.splits(from)[to]);
                        return start;
                    });
                break;
            default:
                break;
        }
        return Step::Done;
    }

   private:
    // The hosts' sums, added in the order of the hosts on every rank, so that all get the same bits.
    void reduce(const Header& lead, const Range& wanted) {
        if (request_.pieces.empty()) return;  // joined
        const std::size_t item = item_size(lead.dtype);
        std::vector<const std::byte*> partials;
        for (int host = 0; host < fabric_.hosts(); ++host) {
            const std::byte* partial = agreement_.partial(host);
            if (partial == nullptr) continue;
            partials.push_back(partial);
        }
        const std::vector<Header> with_data(partials.size(), lead);
        const Reduction reduction(with_data, lead, headers_.size(), Share::AllHosts);
        // A reducescatter's output starts at its own rows.
        const std::uint64_t shift = wanted.begin;
        for_range(request_.pieces, wanted.begin, wanted.end,
                  [&](const Piece& piece, std::uint64_t offset, std::uint64_t at, std::uint64_t n) {
                      const std::uint64_t place = lead.kind == OpKind::ReduceScatter ? offset - shift : offset;
                      void* dst = piece.output + place * item;
                      reduction.run(&dst, 1, n, [&](int source) {
                          return partials[static_cast<std::size_t>(source)] + (wanted.begin + at) * item;
                      });
                  });
    }

    template <class Count, class Start>
    void gather(const Header& lead, Count&& count, Start&& start) {
        const std::size_t item = item_size(lead.dtype);
        std::vector<std::int64_t> counts;
        for (int from = 0; from < fabric_.size(); ++from) counts.push_back(static_cast<std::int64_t>(count(from)));
        const std::vector<std::byte*> places = result_.place(request_, std::move(counts), item);
        for (int from = 0; from < fabric_.size(); ++from) {
            const std::size_t bytes = count(from) * item;
            std::byte* const to = places[static_cast<std::size_t>(from)];
            if (bytes > 0) std::memcpy(to, agreement_.payload(from) + start(from) * item, bytes);
        }
    }

    Fabric& fabric_;
    const Request& request_;
    const Agreement& agreement_;
    Result& result_;
    const std::vector<Header>& headers_;
    int index_ = 0;
};

}  // namespace

std::unique_ptr<Algorithm> make_eager(const Operation& operation) {
    return std::make_unique<SmallOperation>(operation.group, *operation.fabric, operation.request, *operation.agreement,
                                            operation.result);
}

}  // namespace ring
