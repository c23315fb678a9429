// Makes a work with its header from a request, and checks all that needs no other rank.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "ring/communicator/communicator.hpp"
#include "ring/communicator/device_side.hpp"

namespace ring {
namespace {

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

// Whether this rank would receive into a tensor that other ranks still read; an allgather's own part may already be in
// its place.
bool targets_touch_inputs(const Request& request, int own) {
    const std::size_t item = item_size(request.dtype);
    for (const Piece& piece : request.pieces)
        for (std::size_t from = 0; from < request.targets.size(); ++from) {
            const Target& target = request.targets[from];
            const bool is_in_place = request.kind == OpKind::Allgather && static_cast<int>(from) == own &&
                                     target.data == piece.input && target.count == piece.count;
            if (!is_in_place && overlap(piece.input, piece.count * item, target.data, target.count * item)) return true;
        }
    return false;
}

// Two outputs that share memory, by their numbers: each would overwrite the sum of the other. None where none do.
std::optional<std::pair<std::size_t, std::size_t>> written_twice(const std::vector<Piece>& pieces, std::size_t item) {
    struct Span {
        const std::byte *begin, *end;
        std::size_t number;
    };
    std::vector<Span> spans;
    spans.reserve(pieces.size());
    for (const Piece& piece : pieces)
        if (piece.count > 0)
            spans.push_back(
                {piece.output, piece.output + piece.count * item, static_cast<std::size_t>(&piece - pieces.data())});
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const auto found =
        std::adjacent_find(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return b.begin < a.end; });
    if (found == spans.end()) return std::nullopt;
    return std::minmax(found[0].number, found[1].number);
}

}  // namespace

InvalidArgument Communicator::invalid(const Request& request, const std::string& why) const {
    return InvalidArgument(who() + ": " + to_string(request.kind) +
                           (request.name.empty() ? "" : " '" + request.name + "'") + ": " + why);
}

void Communicator::validate(const Request& request) const {
    const auto invalid = [&](const std::string& why) { return this->invalid(request, why); };
    if (!ring_memory()->owned()) throw invalid("a forked process cannot use its parent's communicator");
    check_open(request);
    if (request.shape.size() > kMaxDims)
        throw invalid("a tensor has " + std::to_string(request.shape.size()) +
                      " dimensions; at most 8 are supported. Flatten it.");
    if ((request.kind == OpKind::Broadcast && request.root < 0) || request.root >= size())
        throw invalid("root " + std::to_string(request.root) + " is not in this group of " + std::to_string(size()));
    if (request.kind == OpKind::ReduceScatter && request.shape.empty())
        throw invalid("a tensor without dimensions has no rows to scatter");
    if (request.kind == OpKind::Allreduce && request.pieces.size() > 1)
        if (const auto twice = written_twice(request.pieces, item_size(request.dtype)))
            throw invalid("its tensors " + std::to_string(twice->first) + " and " + std::to_string(twice->second) +
                          " (counted from 0) share memory; give each memory once, or clone one of them");
    if (request.kind == OpKind::Alltoall && !in_host_memory(request.device) && request.pieces.size() != 1)
        throw invalid("on a device a collective takes one tensor; concatenate them");
    if (request.op == ReduceOp::Adasum) {
        const bool power_of_two = (size() & (size() - 1)) == 0;
        if (request.kind != OpKind::Allreduce) throw invalid("adasum is an allreduce only");
        if (!power_of_two)
            throw invalid("adasum works among a power of two of ranks, and this group has " + std::to_string(size()));
        if (kernels().adasum[static_cast<int>(request.dtype)] == nullptr)
            throw invalid(std::string("adasum takes floating point tensors, not ") + to_string(request.dtype));
    }
    if (reduces(request.kind) && request.op != ReduceOp::Adasum && reduce_kernel(request.dtype, request.op) == nullptr)
        throw invalid(std::string(to_string(request.op)) + " takes no " + to_string(request.dtype) +
                      " tensors; convert them on every rank, or use another op");
    if (request.kind == OpKind::Alltoall) {
        std::int64_t sum = 0;
        for (std::int64_t split : request.splits) {
            if (split < 0) throw invalid("a split is negative");
            sum += split;
        }
        if (request.splits.size() != static_cast<std::size_t>(size()) ||
            static_cast<std::uint64_t>(sum) != request.count())
            throw invalid("splits must be one per rank and add up to the tensor's " + std::to_string(request.count()) +
                          " elements");
    }
}

std::shared_ptr<Work> Communicator::make_work(Request request, double timeout) const {
    validate(request);
    std::shared_ptr<Work> work = prepare(std::move(request), timeout);
    if (device_ && work->request.device == Device::Cuda) device_->prepare(*work);
    generation_.recorder->call(work->times, work->header, log_group_, work->request.site);
    return work;
}

std::shared_ptr<Work> Communicator::prepare(Request request, double timeout) const {
    if (targets_touch_inputs(request, index())) request.targets.clear();
    auto work = std::make_shared<Work>();
    work->deadline = deadline_after(timeout);
    generation_.recorder->begin_phase(work->times);
    if (generation_.devices) work->late = generation_.devices->late_failure();
    Header& header = work->header;
    header.kind = request.kind;
    header.dtype = request.dtype;
    header.device = request.device;
    header.op = request.op;
    header.prescale = request.prescale;
    header.postscale = request.postscale;
    if (request.root >= 0) header.root = ranks()[static_cast<std::size_t>(request.root)];
    // Rounding costs a sum little. A rounded maximum would not be one of the ranks' numbers any more, and a product
    // could overflow.
    if (fabric_ && request.kind == OpKind::Allreduce && request.dtype == DType::Float32 && is_sum(request.op))
        header.wire = fabric_->wire();
    // The input of an alltoall may be any number of tensors; its splits describe it.
    if (request.kind != OpKind::Alltoall) header.tensors = static_cast<std::int32_t>(request.pieces.size());
    header.count = request.count();
    header.layout = request.layout;
    header.operations = static_cast<std::uint8_t>(std::min(request.operations, 255));
    header.dims = static_cast<std::uint8_t>(request.shape.size());
    std::copy(request.shape.begin(), request.shape.end(), header.shape);
    set_name(header, request.name);
    set_digest(header);
    work->request = std::move(request);
    return work;
}

void Communicator::share_device(Work& fused, const Work& part) {
    if (!part.device) return;
    if (!fused.device) {
        fused.device = std::make_shared<DeviceWork>();
        fused.device->context = part.device->context;
        fused.device->stream = part.device->stream;
    }
    fused.device->ready.insert(fused.device->ready.end(), part.device->ready.begin(), part.device->ready.end());
}

}  // namespace ring
