// A small allreduce among the ranks of one host without a handle, a queue and a state machine, which would take most of
// its time when no rank is late.
//
// It posts the same header and passes the same gate as any other. If a rank is late or disagrees, it becomes an
// ordinary operation that has arrived at its first gate. One that is started without a wait also arrives in its
// caller's thread, which takes the result if it asks within a millisecond; after that the progress thread does.
#include "ring/communicator/small_allreduce.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/base/text.hpp"
#include "ring/collectives/device/device_stream.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr int kMostRanks = 64;

// The header without its sequence.
Header header_of(const SmallAllreduce& call) {
    Header header;
    header.kind = OpKind::Allreduce;
    header.dtype = call.dtype;
    header.op = call.op;
    header.is_inline = 1;
    header.prescale = call.prescale;
    header.postscale = call.postscale;
    header.tensors = call.tensors;
    header.count = call.count;
    header.layout = call.layout;
    header.dims = static_cast<std::uint8_t>(call.dims);
    std::copy_n(call.shape, call.dims, header.shape);
    set_name(header, call.name);
    set_digest(header);
    return header;
}

}  // namespace

struct Communicator::Arrival {
    Header header;
    std::uint64_t gate = 0;
    std::int64_t begin = 0;
    std::uint64_t record = 0;  // in the log of operations
    std::int64_t end = 0;      // set when it has completed
};

void Communicator::end_turn(bool drops_front, bool front_has_arrived) {
    const std::size_t left = queue_.end_turn(drops_front);
    idle_.ring();
    if (left == 1 && front_has_arrived) {
        generation_.progress->watch();
    } else if (left > 0) {
        generation_.progress->nudge();
    }
}

// Posts it and arrives, in this thread's turn. False, without effect, for an operation that must be an ordinary one.
bool Communicator::post_small(const SmallAllreduce& call, Arrival& arrival) {
    if (fabric_ || size() > kMostRanks || call.count * item_size(call.dtype) > group_->inline_bytes() ||
        call.dims > kMaxDims || reduce_kernel(call.dtype, call.op) == nullptr || generation_.recorder->on() ||
        !ring_memory()->owned() || group_->aborted() || generation_.group->left())
        return false;
    arrival.header = header_of(call);  // before the turn, which an exception would never end
    if (!queue_.try_turn()) return false;
    arrival.begin = monotonic_ns();
    arrival.header.sequence = ++sequence_;
    std::byte* slot = group_->inline_slot(group_->index(), arrival.header.sequence);
    for (int i = 0; i < call.tensors; ++i) {
        const std::size_t bytes = call.pieces[i].count * item_size(call.dtype);
        if (bytes > 0) std::memcpy(slot, call.pieces[i].input, bytes);
        slot += bytes;
    }
    if (OperationLog* log = generation_.recorder->log().get())
        arrival.record = log->begin(arrival.header, log_group_, arrival.begin, arrival.begin, 0);
    group_->post(arrival.header);
    generation_.recorder->add_posted(call.count * item_size(call.dtype));
    group_->set_state(RankState::Waiting, arrival.begin);
    arrival.gate = group_->arrive();
    return true;
}

// Takes the result if all ranks have come, and agree.
bool Communicator::complete_small(const SmallAllreduce& call, Arrival& arrival) {
    const Header& header = arrival.header;
    if (!group_->all_have_arrived(arrival.gate) || !group_->agrees_at_once(header)) return false;
    // In this order: a rank that gives up after the abort then sees that all have come, and completes it too.
    if (group_->aborted() && !group_->decide(header.sequence)) return false;
    const void* sources[kMostRanks];
    for (int i = 0; i < size(); ++i) sources[i] = group_->inline_slot(i, header.sequence);
    Scale scale = scale_behind(header, static_cast<std::size_t>(size()));
    scale.pre = header.prescale;
    const ReduceFn kernel = kernel_of(header);
    for (int i = 0; i < call.tensors; ++i) {
        const Piece& piece = call.pieces[i];
        void* output = piece.output;
        if (piece.count > 0) kernel(&output, 1, sources, size(), piece.count, scale);
        for (int j = 0; j < size(); ++j)
            sources[j] = static_cast<const std::byte*>(sources[j]) + piece.count * item_size(call.dtype);
    }
    arrival.end = monotonic_ns();
    group_->set_state(RankState::Idle, arrival.end);
    if (arrival.record != 0) generation_.recorder->log()->end(arrival.record, arrival.end, true);
    return true;
}

bool Communicator::allreduce_small(const SmallAllreduce& call, double timeout, const Interruption& check,
                                   const std::function<std::uint32_t()>& before_wait) {
    Arrival arrival;
    if (!post_small(call, arrival)) return false;
    bool done = complete_small(call, arrival);
    for (int looks = group_->spin().yield ? 0 : kFewLooks; !done && looks > 0; --looks) {
        cpu_pause();
        if (group_->all_have_arrived(arrival.gate)) {
            done = complete_small(call, arrival);
            break;
        }
    }
    if (done) {
        generation_.recorder->spend(arrival.end - arrival.begin);
        end_turn();
        return true;
    }
    if (const std::uint32_t site = before_wait(); arrival.record != 0)
        generation_.recorder->log()->set_site(arrival.record, site);
    const std::shared_ptr<Work> work = arrived_work(call, arrival, timeout, false);
    carry_out(*work, check);
    end_turn();
    generation_.recorder->spend(monotonic_ns() - arrival.begin);
    note_caller(*work, arrival.begin);
    work->get();
    return true;
}

bool Communicator::start_small(const SmallAllreduce& call, double timeout, std::shared_ptr<Work>& work) {
    generation_.progress->begin();
    Arrival arrival;
    if (!post_small(call, arrival)) return false;
    const bool done = complete_small(call, arrival);
    if (done) generation_.recorder->spend(arrival.end - arrival.begin);
    if (!done) work = arrived_work(call, arrival, timeout, true);
    end_turn(false, !done);
    return true;
}

// Makes an ordinary operation of a small one at its gate, ahead of all that were queued since.
std::shared_ptr<Work> Communicator::arrived_work(const SmallAllreduce& call, Arrival& arrival, double timeout,
                                                 bool queued) {
    try {
        auto work = std::make_shared<Work>();
        if (generation_.devices) work->late = generation_.devices->late_failure();
        work->request = call.request(arrival.header.shape);
        work->header = arrival.header;
        work->deadline = deadline_after(timeout);
        work->machine.gate = arrival.gate;
        work->times.blocked = arrival.begin;
        if (arrival.record != 0) work->times.log = generation_.recorder->log();
        work->times.record = arrival.record;
        work->machine.stage = Work::Stage::Posted;
        if (queued) queue_.push_front(work);
        return work;
    } catch (...) {  // the others have this rank's part, and it cannot take theirs
        group_->abort(FixedText("rank %d ran out of memory in %s", rank(), to_string(arrival.header.kind)));
        if (group_->all_have_come(arrival.gate) || group_->rule_out(arrival.header.sequence))
            complete_small(call, arrival);  // as they may have done
        announce_abort();
        group_->set_state(RankState::Idle);
        end_turn();
        throw;
    }
}

// Takes the result of one that was started, now that all ranks may have come.
bool Communicator::complete_started(Work& work) {
    const Request& request = work.request;
    const bool is_small = work.header.kind == OpKind::Allreduce && work.header.op != ReduceOp::Adasum &&
                          size() <= kMostRanks && !work.machine.algorithm && !work.machine.bounce &&
                          !generation_.recorder->on();
    if (!is_small) return false;
    SmallAllreduce call;
    call.dtype = request.dtype;
    call.pieces = request.pieces.data();
    call.tensors = static_cast<int>(request.pieces.size());
    if (work.times.released == 0) work.times.released = monotonic_ns();
    Arrival arrival{work.header, work.machine.gate, work.times.blocked};
    if (!complete_small(call, arrival)) return false;
    work.finish(nullptr);
    return true;
}

bool Communicator::look(Work& work, int looks) {
    if (work.done()) return true;
    if (fabric_ || !ring_memory()->owned()) return false;
    const auto front = queue_.take_front(
        [&](const Work& one) { return &one == &work && work.started() && work.header.is_inline != 0 && !work.device; });
    if (!front) return false;
    bool ended = false;
    for (; !ended && looks > 0; --looks) {
        if (group_->ready(work.machine.gate)) {
            ended = complete_started(work) || advance(work) == Served::Done;
        } else if (group_->spin().yield) {
            cpu_yield();
        } else {
            cpu_pause();
        }
    }
    end_turn(ended, !ended);
    return ended;
}

}  // namespace ring
