// Where the tensors of an operation lie: the offsets in their headers.
#include <cstring>
#include <vector>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/group/header_damage.hpp"

namespace ring {
namespace {

constexpr std::size_t kLineBytes = 64;
// A list pays if at most 1/kListedPart of it must be copied.
constexpr std::size_t kListedPart = 4;

// Bytes that the ranks of a host read at the input, or write at the output, of one of them.
std::uint64_t placed_bytes(const Header& header, bool one_host) {
    const std::uint64_t bytes = header.count * item_size(header.dtype);
    if (header.op == ReduceOp::Adasum) return 2 * bytes;
    return header.tensors > 1 && one_host ? static_cast<std::uint64_t>(header.tensors) * sizeof(ListedPiece) : bytes;
}

}  // namespace

// Writes to the header where the tensors lie. Only when the operation begins: before that, an earlier one in the queue
// may still write to them.
void Communicator::place_tensors(Work& work) const {
    const Request& request = work.request;
    Header& header = work.header;
    if (!in_host_memory(request.device)) return;
    if (request.pieces.size() == 1) {
        const Piece& piece = request.pieces.front();
        const std::size_t bytes = piece.count * item_size(request.dtype);
        header.input = domain()->offset_of(piece.input, bytes);
        header.output = domain()->offset_of(piece.output, bytes);
    } else if (request.kind == OpKind::Allreduce && header.is_inline == 0 && !request.pieces.empty() && size() > 1 &&
               !fabric_ && request.op != ReduceOp::Adasum) {
        place_list(work);
    }
}

// Throws Error for headers that no rank writes, and for places of this host's tensors that are not in ring memory.
void Communicator::check_posted(const std::vector<Header>& headers) const {
    check_headers(headers, ranks(), group_->inline_bytes());
    for (std::size_t i = 0; i < headers.size(); ++i) {
        const Header& header = headers[i];
        const auto member = static_cast<int>(i);
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        for (std::uint64_t place : {header.input, header.output})
            if (place != kNowhere && !domain()->contains(place, placed_bytes(header, !fabric_)))
                throw_damaged(ranks()[i], "a tensor beyond ring memory");
        if (header.kind == OpKind::Alltoall && !fabric_ &&
            !adds_up(group_->splits(member, header.sequence), size(), header.count))
            throw_damaged(ranks()[i], "splits that are not those of its tensor");
    }
}

// Lists for the other ranks where the tensors of a fused allreduce lie, when most of it is in ring memory; the rest is
// copied there. Leaves the header unchanged where that does not pay, or memory is short.
void Communicator::place_list(Work& work) const {
    const std::vector<Piece>& pieces = work.request.pieces;
    const std::size_t item = item_size(work.request.dtype);
    std::vector<ListedPiece> list(pieces.size());
    std::size_t copies = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
        const Piece& piece = pieces[i];
        const std::size_t bytes = piece.count * item;
        list[i] = {domain()->offset_of(piece.input, bytes), domain()->offset_of(piece.output, bytes), piece.count};
        if (list[i].input == kNowhere || list[i].output == kNowhere) copies += round_up(bytes, kLineBytes);
    }
    if (copies * kListedPart > work.header.count * item) return;
    const std::size_t table = round_up(list.size() * sizeof(ListedPiece), kLineBytes);
    try {
        work.machine.bounce.emplace(domain(), table + copies);
    } catch (const OutOfMemory&) {
        return;
    }
    auto* const begin = static_cast<std::byte*>(work.machine.bounce->data());
    std::byte* copy = begin + table;
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].input != kNowhere && list[i].output != kNowhere) continue;
        const std::size_t bytes = pieces[i].count * item;
        if (bytes > 0) work.machine.guests.push_back({pieces[i].input, copy, pieces[i].output, bytes});
        list[i].input = list[i].output = domain()->offset_of(copy, bytes);
        copy += round_up(bytes, kLineBytes);
    }
    std::memcpy(begin, list.data(), list.size() * sizeof(ListedPiece));
    work.header.input = work.header.output = domain()->offset_of(begin, table);
}

}  // namespace ring
