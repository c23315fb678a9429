#include "ring/collectives/host/algorithm.hpp"

#include <cmath>
#include <cstdlib>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"

namespace ring {
namespace {

// Barrier: passing the gate is all.
class Nothing : public GatedAlgorithm {
   public:
    bool step(std::uint64_t) override { return true; }
};

// All ranks have joined: the result is the rank that joined last.
class Join : public GatedAlgorithm {
   public:
    Join(const std::vector<Header>& headers, Result& result) : result_(result) {
        const auto when = [](const Header& one) { return std::make_pair(one.joined_at, one.join_called); };
        for (std::size_t i = 0; i < headers.size(); ++i)
            if (when(headers[i]) >= when(headers[last_])) last_ = i;
    }
    bool step(std::uint64_t) override {
        result_.last_joined = static_cast<int>(last_);
        return true;
    }

   private:
    Result& result_;
    std::size_t last_ = 0;
};

bool is_rounded_between_hosts(const Header& header) {
    return (is_floating(header.dtype) && item_size(header.dtype) == 2) || header.wire != DType::Float32;
}

}  // namespace

std::uint64_t Request::count() const {
    std::uint64_t total = 0;
    for (const Piece& piece : pieces) total += piece.count;
    return total;
}

void Result::allocate(std::size_t size) {
    bytes = size;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, std::max<std::size_t>(size, 64)) != 0)
        throw OutOfMemory("cannot allocate " + std::to_string(size) + " bytes for the result");
    data.reset(static_cast<std::byte*>(memory), std::free);
}

std::vector<std::byte*> Result::place(const Request& request, std::vector<std::int64_t> from, std::size_t item) {
    counts = std::move(from);
    placed = request.targets.size() == counts.size();
    std::size_t total = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        total += static_cast<std::size_t>(counts[i]) * item;
        placed = placed && request.targets[i].count == static_cast<std::uint64_t>(counts[i]);
    }
    std::vector<std::byte*> places;
    if (!placed) allocate(total);
    std::byte* next = data.get();
    for (std::size_t i = 0; i < counts.size(); ++i) {
        places.push_back(placed ? request.targets[i].data : next);
        if (!placed) next += static_cast<std::size_t>(counts[i]) * item;
    }
    return places;
}

Range chunk_range(std::uint64_t count, int size, int index, std::size_t item) {
    const std::uint64_t line = 64 / item;
    const std::uint64_t lines = (count + line - 1) / line;
    const auto n = static_cast<std::uint64_t>(size);
    const auto i = static_cast<std::uint64_t>(index);
    return {std::min(count, lines * i / n * line), std::min(count, lines * (i + 1) / n * line)};
}

Range row_range(std::uint64_t count, std::int64_t rows, int size, int index) {
    const std::uint64_t width = rows > 0 ? count / static_cast<std::uint64_t>(rows) : 0;
    const std::int64_t base = rows / size;
    const std::int64_t extra = rows % size;
    const std::int64_t first = base * index + std::min<std::int64_t>(index, extra);
    const std::int64_t own = base + (index < extra ? 1 : 0);
    return {static_cast<std::uint64_t>(first) * width, static_cast<std::uint64_t>(first + own) * width};
}

ReduceFn kernel_of(const Header& header) { return reduce_kernel(header.dtype, header.op); }

Scale scale_behind(const Header& header, std::size_t size) {
    Scale scale;
    scale.post = header.postscale;
    if (header.op == ReduceOp::Average) {
        if (is_integer(header.dtype)) {
            scale.divisor = static_cast<long long>(size);
        } else {
            scale.post /= static_cast<double>(size);
        }
    }
    return scale;
}

Reduction::Reduction(const std::vector<Header>& headers, const Header& lead, std::size_t size, Share share)
    : kernel_(kernel_of(lead)), finish_(scale_behind(lead, size)) {
    for (std::size_t i = 0; i < headers.size(); ++i)
        if (headers[i].kind != OpKind::Join) contributors_.push_back(static_cast<int>(i));
    // A sum that is rounded to two bytes between hosts must not overflow when its average is in range. So the power of
    // two in a factor below 1 is applied before the first rounding, which loses no precision.
    double early = 1.0;
    if (share != Share::Whole && is_sum(lead.op) && is_rounded_between_hosts(lead) && std::abs(finish_.post) < 1.0) {
        int exponent = 0;
        std::frexp(finish_.post, &exponent);
        early = std::ldexp(0.5, exponent);  // at most the factor, and more than half of it
        finish_.post /= early;
    }
    if (share == Share::OneHost) {
        scale_.post = early;
    } else {
        scale_ = finish_;
    }
    if (share != Share::AllHosts) scale_.pre = lead.prescale;
}

void Reduction::combine(void* dst, const void* a, const void* b, std::uint64_t count) const {
    const void* sources[] = {a, b};
    kernel_(&dst, 1, sources, 2, count, Scale{});
}

void Reduction::finish(void* data, std::uint64_t count) const {
    const void* source = data;
    if (!finish_.identity()) kernel_(&data, 1, &source, 1, count, finish_);
}

const Header& lead_header(const std::vector<Header>& headers) {
    for (const Header& header : headers)
        if (header.kind != OpKind::Join) return header;
    return headers.front();
}

bool fill_inline(const HostGroup& group, const Request& request, int index, std::uint64_t sequence) {
    const std::size_t item = item_size(request.dtype);
    const std::uint64_t count = request.count();
    if (!in_host_memory(request.device) || count * item > group.inline_bytes() || request.op == ReduceOp::Adasum)
        return false;
    if (request.kind != OpKind::Broadcast || request.root == index)
        copy_in(request.pieces, 0, count, group.inline_slot(group.index(), sequence), item);
    return true;
}

std::unique_ptr<Algorithm> make_nothing(const Operation&) { return std::make_unique<Nothing>(); }

RING_MAKER(make_join, Join, operation.headers, operation.result)

}  // namespace ring
