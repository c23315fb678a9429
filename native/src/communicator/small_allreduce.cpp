// A small allreduce among the ranks of one host without what a handle, a queue and a state machine cost: where no rank
// is late these would take most of its time.
//
// It posts the same header and passes the same gate as any other. As soon as there is anything else to do, from a rank
// that keeps it waiting to one that disagrees, it becomes an ordinary operation that has arrived at its first gate.
#include "ring/communicator/small_allreduce.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/base/text.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr int kMostRanks = 64;
// Looks at the others before this becomes an ordinary operation: some 2 µs.
constexpr int kLooks = 50;

Header header_of(const SmallAllreduce& call, std::uint64_t sequence) {
    Header header;
    header.sequence = sequence;
    header.kind = OpKind::Allreduce;
    header.dtype = call.dtype;
    header.op = call.op;
    header.is_inline = 1;
    header.prescale = call.prescale;
    header.postscale = call.postscale;
    header.count = call.count;
    header.dims = static_cast<std::uint8_t>(call.dims);
    std::copy_n(call.shape, call.dims, header.shape);
    set_name(header, call.name);
    set_digest(header);
    return header;
}

}  // namespace

bool Communicator::try_turn() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed() || epoch_.group->left() || !is_idle()) return false;
    inline_thread_ = std::this_thread::get_id();
    return true;
}

void Communicator::end_turn() {
    bool more = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        inline_thread_ = {};
        more = !queue_.empty();
    }
    idle_.ring();
    if (more) epoch_.progress->nudge();
}

bool Communicator::allreduce_small(const SmallAllreduce& call, double timeout, const Interruption& check,
                                   const std::function<void()>& before_wait) {
    const std::size_t bytes = call.count * item_size(call.dtype);
    if (fabric_ || size() > kMostRanks || bytes > group_->inline_bytes() || call.dims > kMaxDims ||
        call.op == ReduceOp::Adasum || epoch_.recorder->on() || !domain()->owned() || group_->aborted() || !try_turn())
        return false;

    const std::int64_t begin = monotonic_ns();
    const Header header = header_of(call, ++sequence_);
    if (bytes > 0) std::memcpy(group_->inline_slot(group_->index(), header.sequence), call.input, bytes);
    group_->post(header);
    group_->set_state(RankState::Waiting, begin);
    const std::uint64_t gate = group_->arrive();

    bool all_here = group_->all_have_arrived(gate);
    for (int looks = group_->spin().yield ? 0 : kLooks; !all_here && looks > 0; --looks) {
        cpu_pause();
        all_here = group_->all_have_arrived(gate);
    }
    if (all_here && !group_->aborted() && group_->agrees_at_once(header)) {
        const void* sources[kMostRanks];
        for (int i = 0; i < size(); ++i) sources[i] = group_->inline_slot(i, header.sequence);
        void* output = call.output;
        Scale scale = scale_behind(header, static_cast<std::size_t>(size()));
        scale.pre = header.prescale;
        if (call.count > 0) kernel_of(header)(&output, 1, sources, size(), call.count, scale);
        const std::int64_t end = monotonic_ns();
        group_->set_state(RankState::Idle, end);
        end_turn();
        epoch_.recorder->spend(end - begin);
        return true;
    }
    before_wait();
    const std::shared_ptr<Work> work = arrived_work(call, header, gate, timeout);
    carry_out(*work, check);
    end_turn();
    epoch_.recorder->spend(monotonic_ns() - begin);
    work->get();
    return true;
}

// The ordinary operation that a small one becomes at its gate.
std::shared_ptr<Work> Communicator::arrived_work(const SmallAllreduce& call, const Header& header, std::uint64_t gate,
                                                 double timeout) {
    try {
        auto work = std::make_shared<Work>();
        Request& request = work->request_;
        request.kind = header.kind;
        request.dtype = call.dtype;
        request.op = call.op;
        request.prescale = call.prescale;
        request.postscale = call.postscale;
        request.pieces = {{call.input, call.output, call.count}};
        request.shape.assign(header.shape, header.shape + header.dims);
        request.name = call.name;
        work->header_ = header;
        work->deadline_ = deadline_after(timeout);
        work->gate_ = gate;
        work->started_ = true;
        return work;
    } catch (...) {  // the others have this rank's part, and it cannot take theirs
        group_->abort(FixedText("rank %d ran out of memory in %s", rank(), to_string(header.kind)));
        announce_abort();
        group_->set_state(RankState::Idle);
        end_turn();
        throw;
    }
}

}  // namespace ring
