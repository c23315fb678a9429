// One operation as a state machine: it advances whenever its gate or its link may have moved, and never waits.
#include <algorithm>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/collectives/inter_host/link_model.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/group/header_damage.hpp"
#include "ring/group/mismatch.hpp"

namespace ring {
namespace {

// The newest change that all ranks have received.
std::uint64_t newest_of_all(const std::vector<Header>& headers) {
    std::uint64_t newest = ~std::uint64_t{0};
    for (const Header& one : headers) newest = std::min(newest, one.kind == OpKind::Commit ? one.layout : 0);
    return newest;
}

// Bytes that the ranks of a host read at the input, or write at the output, of one of them.
std::uint64_t placed_bytes(const Header& header) {
    return header.count * item_size(header.dtype) * (header.op == ReduceOp::Adasum ? 2 : 1);
}

}  // namespace

void Communicator::begin(Work& work) {
    work.machine.stage = Work::Stage::Queued;  // a joined rank begins again
    group_->be_patient(work.patience, sequence_ + 1);
    const bool commits = work.request.kind == OpKind::Commit;
    if (commits) read_notices();
    // A commit that has begun still waits for messages that were sent before an abort; after an abort none begins.
    if (commits ? group_->aborted() : group_->stops()) throw Aborted(group_->abort_reason());
    if (work.first) work.first->get();  // where the first has failed, all ranks skip the rest of the call
    work.first.reset();
    Header& header = work.header;
    header.sequence = ++sequence_;
    note(work, work.origin == Work::Origin::Names ? Phase::Negotiating : Phase::Queued);
    if (header.kind == OpKind::Join && header.joined_at == 0) header.joined_at = header.sequence;
    const bool goes = header.kind != OpKind::Allreduce || goes_with_headers(static_cast<std::uint64_t>(topology_.hosts),
                                                                            header.count * item_size(header.dtype));
    header.is_inline = goes && fill_inline(*group_, work.request, index(), header.sequence) ? 1 : 0;
    place_tensors(work);
    if (in_host_memory(work.request.device) && ((fabric_ && header.is_inline == 0) || header.op == ReduceOp::Adasum))
        move_to_ring(work);
    if (header.kind == OpKind::Alltoall)
        std::copy(work.request.splits.begin(), work.request.splits.end(),
                  group_->splits(group_->index(), header.sequence));
    note(work, Phase::Packing);
    group_->post(header);
    generation_.recorder->add_posted(header.count * item_size(header.dtype));
    group_->set_state(RankState::Waiting);
    work.times.arrive(header);
    work.machine.gate = group_->gates() + 1;  // also where `arrive` throws
    work.machine.stage = Work::Stage::Posted;
    work.machine.algorithm.reset();  // before the agreement, whose memory it reads
    work.machine.agreement.reset();
    work.machine.gates = 0;
    const bool may_launch = device_ && (header.kind == OpKind::Join || !in_host_memory(header.device));
    work.machine.gate = group_->arrive(may_launch ? header.sequence : 0);
    if (device_) device_->posted(work);
}

// Writes to the header where the tensors lie. Only when the operation begins: before that, an earlier one in the queue
// may still write to them.
void Communicator::place_tensors(Work& work) const {
    const Request& request = work.request;
    Header& header = work.header;
    if (!in_host_memory(request.device) || request.pieces.size() != 1) return;
    const Piece& piece = request.pieces.front();
    const std::size_t bytes = piece.count * item_size(request.dtype);
    header.input = ring_memory()->offset_of(piece.input, bytes);
    header.output = ring_memory()->offset_of(piece.output, bytes);
}

// Throws Error for headers that no rank writes, and for places of this host's tensors that are not in ring memory.
void Communicator::check_posted(const std::vector<Header>& headers) const {
    check_headers(headers, ranks(), group_->inline_bytes());
    for (std::size_t i = 0; i < headers.size(); ++i) {
        const Header& header = headers[i];
        const auto member = static_cast<int>(i);
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        for (std::uint64_t place : {header.input, header.output})
            if (place != kNowhere && !ring_memory()->contains(place, placed_bytes(header)))
                throw_damaged(ranks()[i], "a tensor beyond ring memory");
        if (header.kind == OpKind::Alltoall && !fabric_ &&
            !adds_up(group_->splits(member, header.sequence), size(), header.count))
            throw_damaged(ranks()[i], "splits that are not those of its tensor");
    }
}

// Between hosts, the rank that carries a chunk reads and writes the tensors of all ranks of its host. Adasum works on
// two copies of its own.
void Communicator::move_to_ring(Work& work) {
    Header& header = work.header;
    const bool adasum = header.op == ReduceOp::Adasum;
    const bool writes = output_of(header.kind) == Output::Whole;
    if (!adasum && header.input != kNowhere && (!writes || header.output != kNowhere)) return;
    const std::size_t item = item_size(header.dtype);
    work.machine.bounce.emplace(ring_memory(), header.count * item * (adasum ? 2 : 1));
    auto* data = static_cast<std::byte*>(work.machine.bounce->data());
    if (header.kind != OpKind::Broadcast || work.request.root == index())
        copy_in(work.request.pieces, 0, header.count, data, item);
    header.input = header.output = ring_memory()->offset_of(data, header.count * item);
}

Communicator::Served Communicator::attempt(Work& work) {
    group_->be_patient(work.patience, work.header.sequence);  // the group carries out one operation at a time
    if (work.machine.stage == Work::Stage::Moved) return complete(work);
    if (!work.machine.polling) {
        if (!group_->released(work.machine.gate)) {
            if (!work.machine.algorithm) work.times.block();
            if (group_->ready(work.machine.gate)) group_->check_alive(work.machine.gate, false);
            return Served::Blocked;
        }
        if (work.times.blocked != 0 && work.times.released == 0 && !fabric_) work.times.released = monotonic_ns();
        note(work, work.machine.algorithm ? Phase::Moving : Phase::Waiting);
    }
    if (fabric_ && work.machine.stage == Work::Stage::Posted) {
        if (!work.machine.agreement)
            work.machine.agreement = std::make_unique<Agreement>(group_, *fabric_, ranks(), work.header.sequence);
        const HostGroup::Moving moving(*group_);
        const Step step = work.machine.agreement->advance(work.machine.gates);
        if (step != Step::Done) {
            work.times.block();
            return take_step(work, step);
        }
        work.machine.stage = Work::Stage::Agreed;
        if (work.times.blocked != 0) work.times.released = monotonic_ns();
        work.machine.gates = 0;
    }
    if (!work.machine.algorithm) {
        std::vector<Header> here;
        if (!fabric_) here = group_->headers(work.header.sequence);
        const std::vector<Header>& headers = fabric_ ? work.machine.agreement->headers() : here;
        work.machine.algorithm = make_algorithm(work, headers);
        if (!work.machine.algorithm) {
            device_->agree(work);
            return Served::Moved;
        }
    }
    if (work.machine.takes_one_gate) {
        if (group_->aborted() && !group_->decide(work.header.sequence)) throw Aborted(group_->abort_reason());
        return take_step(work, work.machine.algorithm->advance(0));
    }
    const HostGroup::Moving moving(*group_);
    return take_step(work, work.machine.algorithm->advance(work.machine.gates));
}

// Null where the ranks have not agreed yet on what moves tensors on devices. Throws Mismatch and Unsupported on all
// ranks that have not joined; the group continues. A joined rank did not call the operation, so it keeps taking part.
std::unique_ptr<Algorithm> Communicator::make_algorithm(Work& work, const std::vector<Header>& headers) {
    check_posted(headers);
    work.machine.takes_one_gate = false;
    const bool joined = work.header.kind == OpKind::Join;
    const auto take_no_part = [&] {
        if (device_) device_->take_no_part();
        return make_nothing({*group_, work.request, headers, work.result, fabric_.get(), work.machine.agreement.get()});
    };
    const std::string mismatch = find_mismatch(headers, ranks(), index());
    if (!mismatch.empty() && joined) return take_no_part();
    if (!mismatch.empty()) throw Mismatch(who() + ": " + title(work.header) + ": " + mismatch);
    if (work.header.kind == OpKind::Commit) work.result.newest = newest_of_all(headers);
    if (device_) {
        if (!work.is_check() && device_->must_agree(headers)) return nullptr;
        const bool nccl = work.is_check() || device_->way() == DeviceSide::Way::Nccl;
        topology_.devices = nccl ? Topology::Devices::Nccl : Topology::Devices::Host;
    }
    try {
        const Path& path = choose(headers, topology_);
        Operation operation{*group_, work.request, headers, work.result, fabric_.get(), work.machine.agreement.get()};
        if (device_) device_->take_part(work, operation, path);
        work.machine.takes_one_gate = takes_one_gate(path);
        return path.make(operation);
    } catch (const Unsupported& error) {
        if (joined) return take_no_part();
        throw Unsupported(who() + ": " + title(work.header) + ": " + error.what());
    }
}

Communicator::Served Communicator::take_step(Work& work, Step step) {
    const bool polled = work.machine.polling;
    work.machine.polling = step == Step::Moved || step == Step::AwaitsLink || step == Step::AwaitsDevice;
    if (!work.machine.polling) note(work, polled ? Phase::Sending : Phase::Moving);
    if (step == Step::Gate) {
        ++work.machine.gates;
        work.machine.gate = group_->arrive();
    } else if (step == Step::AwaitsDevice && work.is_check() && work.device->issued) {
        return Served::Done;  // DeviceOpening completes it
    } else if (step == Step::AwaitsLink || step == Step::AwaitsDevice) {
        return Served::Polling;
    } else if (step == Step::Done) {
        work.machine.stage = Work::Stage::Moved;
        return complete(work);
    }
    return Served::Moved;
}

Communicator::Served Communicator::complete(Work& work) {
    if (fabric_ && !work.machine.agreement->all_small()) {
        // A host that gave up first sends a notice, and then possibly wrong data. So notices that are on their way are
        // read before the result counts.
        work.machine.polling = !generation_.fabric->notices().read(*generation_.group);
        if (group_->stops()) throw Aborted(group_->abort_reason());
        if (work.machine.polling) return Served::Polling;
    }
    if (work.header.kind == OpKind::Join && work.result.last_joined < 0 && work.origin != Work::Origin::JoinedForOnce) {
        if (device_) device_->launch_for_joined(work);
        begin(work);  // the others called another operation; take part until all have joined
        return Served::Moved;
    }
    // Another rank may have given up after this one had all headers.
    if (fabric_ && work.header.kind == OpKind::Commit && !group_->decide(work.header.sequence))
        throw Aborted(group_->abort_reason());
    end(work);
    return Served::Done;
}

// Records the phase that ends now; the next one begins.
void Communicator::note(Work& work, Phase phase) {
    const int last = phase == Phase::Waiting ? group_->last_to_come() : -1;
    if (!fabric_ && work.times.last < 0) work.times.last = last;  // another host may have come later
    generation_.recorder->end_phase(work.times, phase, work.header, number_, last);
}

void Communicator::note_caller(const Work& work, std::int64_t begin) const {
    generation_.recorder->end_call(work.times, begin, work.header, number_);
}

void Communicator::end(Work& work) {
    const Header& header = work.header;
    const bool writes = output_of(header.kind) == Output::Whole;
    if (work.machine.bounce && writes && header.op != ReduceOp::Adasum)
        copy_out(work.request.pieces, 0, header.count, static_cast<const std::byte*>(work.machine.bounce->data()),
                 item_size(header.dtype));
    group_->set_state(RankState::Idle);
    if (work.device) {
        device_->launch(work.shared_from_this());
    } else {
        work.finish(nullptr);
    }
}

}  // namespace ring
