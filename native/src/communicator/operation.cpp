// One operation as a state machine: it advances whenever its gate or its link may have moved, and never waits.
#include <algorithm>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/collectives/inter_host/link_model.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/group/mismatch.hpp"

namespace ring {
namespace {

// The newest change that all ranks have received.
std::uint64_t newest_of_all(const std::vector<Header>& headers) {
    std::uint64_t newest = ~std::uint64_t{0};
    for (const Header& one : headers) newest = std::min(newest, one.kind == OpKind::Commit ? one.layout : 0);
    return newest;
}

}  // namespace

Work::Work() = default;
Work::~Work() = default;

void Work::get() const {
    if (state_.load(std::memory_order_seq_cst) != State::Failed) return;
    try {
        std::rethrow_exception(error_);
    } catch (const Mismatch&) {
        throw;
    } catch (const Unsupported&) {
        throw;
    } catch (...) {
        if (late_) late_->tell();
        throw;
    }
}

void Work::hold_back(void* stream) const {
    if (launched() && device_ && device_->done) device_->done->hold_back(stream);
}

void Work::finish(std::exception_ptr error) noexcept {
    error_ = std::move(error);
    algorithm_.reset();
    agreement_.reset();
    bounce_.reset();
    if (device_) device_->copies.reset();
    if (log_) log_->end(record_, monotonic_ns(), !error_);
    state_.store(error_ ? State::Failed : State::Done, std::memory_order_seq_cst);
    bell_.ring();
}

void Communicator::begin(Work& work) {
    work.stage_ = Work::Stage::Queued;  // a joined rank begins again
    group_->be_patient(work.patience_, sequence_ + 1);
    const bool commits = work.request_.kind == OpKind::Commit;
    if (commits) read_notices();
    // A commit that has begun still waits for messages that were sent before an abort; after an abort none begins.
    if (commits ? group_->aborted() : group_->stops()) throw Aborted(group_->abort_reason());
    if (work.first_) work.first_->get();  // where the first has failed, all ranks skip the rest of the call
    work.first_.reset();
    Header& header = work.header_;
    header.sequence = ++sequence_;
    note(work, work.origin_ == Work::Origin::Names ? Phase::Negotiating : Phase::Queued);
    if (header.kind == OpKind::Join && header.joined_at == 0) header.joined_at = header.sequence;
    const bool goes = header.kind != OpKind::Allreduce || goes_with_headers(static_cast<std::uint64_t>(topology_.hosts),
                                                                            header.count * item_size(header.dtype));
    header.is_inline = goes && fill_inline(*group_, work.request_, index(), header.sequence) ? 1 : 0;
    place_tensors(work);
    if (in_host_memory(work.request_.device) && ((fabric_ && header.is_inline == 0) || header.op == ReduceOp::Adasum))
        move_to_ring(work);
    if (header.kind == OpKind::Alltoall)
        std::copy(work.request_.splits.begin(), work.request_.splits.end(),
                  group_->splits(group_->index(), header.sequence));
    for (const Work::Guest& guest : work.guests_) std::memcpy(guest.copy, guest.from, guest.bytes);
    note(work, Phase::Packing);
    group_->post(header);
    epoch_.recorder->add_posted(header.count * item_size(header.dtype));
    group_->set_state(RankState::Waiting);
    if (work.log_) work.log_->arrive(work.record_, header, monotonic_ns());
    work.gate_ = group_->gates() + 1;  // also where `arrive` throws
    work.stage_ = Work::Stage::Posted;
    work.algorithm_.reset();  // before the agreement, whose memory it reads
    work.agreement_.reset();
    work.gates_ = 0;
    const bool may_launch = device_ && (header.kind == OpKind::Join || !in_host_memory(header.device));
    work.gate_ = group_->arrive(may_launch ? header.sequence : 0);
    if (device_) device_->posted(work);
}

// Between hosts, the rank that carries a chunk reads and writes the tensors of all ranks of its host. Adasum works on
// two copies of its own.
void Communicator::move_to_ring(Work& work) {
    Header& header = work.header_;
    const bool adasum = header.op == ReduceOp::Adasum;
    const bool writes = header.kind == OpKind::Allreduce || header.kind == OpKind::Broadcast;
    if (!adasum && header.input != kNowhere && (!writes || header.output != kNowhere)) return;
    const std::size_t item = item_size(header.dtype);
    work.bounce_.emplace(domain(), header.count * item * (adasum ? 2 : 1));
    auto* data = static_cast<std::byte*>(work.bounce_->data());
    if (header.kind != OpKind::Broadcast || work.request_.root == index())
        copy_in(work.request_.pieces, 0, header.count, data, item);
    header.input = header.output = domain()->offset_of(data, header.count * item);
}

Communicator::Served Communicator::attempt(Work& work) {
    group_->be_patient(work.patience_, work.header_.sequence);  // the group carries out one operation at a time
    if (work.stage_ == Work::Stage::Moved) return complete(work);
    if (!work.polling_) {
        if (!group_->released(work.gate_)) {
            if (work.blocked_ == 0 && !work.algorithm_) work.blocked_ = monotonic_ns();
            if (group_->ready(work.gate_)) group_->check_alive(work.gate_, false);
            return Served::Blocked;
        }
        if (work.blocked_ != 0 && work.released_ == 0 && !fabric_) work.released_ = monotonic_ns();
        note(work, Phase::Waiting);
    }
    if (fabric_ && work.stage_ == Work::Stage::Posted) {
        if (!work.agreement_)
            work.agreement_ = std::make_unique<Agreement>(group_, *fabric_, ranks(), work.header_.sequence);
        const HostGroup::Moving moving(*group_);
        const Step step = work.agreement_->advance(work.gates_);
        if (step != Step::Done) {
            if (work.blocked_ == 0) work.blocked_ = monotonic_ns();
            return take_step(work, step);
        }
        work.stage_ = Work::Stage::Agreed;
        if (work.blocked_ != 0) work.released_ = monotonic_ns();
        work.gates_ = 0;
    }
    if (!work.algorithm_) {
        std::vector<Header> here;
        if (!fabric_) here = group_->headers(work.header_.sequence);
        const std::vector<Header>& headers = fabric_ ? work.agreement_->headers() : here;
        work.algorithm_ = make_algorithm(work, headers);
        if (!work.algorithm_) {
            device_->agree(work);
            return Served::Moved;
        }
    }
    if (work.takes_one_gate_) {
        if (group_->aborted() && !group_->decide(work.header_.sequence)) throw Aborted(group_->abort_reason());
        return take_step(work, work.algorithm_->advance(0));
    }
    const HostGroup::Moving moving(*group_);
    return take_step(work, work.algorithm_->advance(work.gates_));
}

// Null where the ranks have not agreed yet on what moves tensors on devices. Throws Mismatch and Unsupported on all
// ranks that have not joined; the group continues. A joined rank did not call the operation, so it keeps taking part.
std::unique_ptr<Algorithm> Communicator::make_algorithm(Work& work, const std::vector<Header>& headers) {
    check_posted(headers);
    work.takes_one_gate_ = false;
    const bool joined = work.header_.kind == OpKind::Join;
    const auto take_no_part = [&] {
        if (device_) device_->take_no_part();
        return make_nothing({*group_, work.request_, headers, work.result_, fabric_.get(), work.agreement_.get()});
    };
    const std::string mismatch = find_mismatch(headers, ranks(), index());
    if (!mismatch.empty() && joined) return take_no_part();
    if (!mismatch.empty()) throw Mismatch(who() + ": " + title(work.header_) + ": " + mismatch);
    if (work.header_.kind == OpKind::Commit) work.result_.newest = newest_of_all(headers);
    if (device_) {
        if (!work.is_trial() && device_->must_agree(headers)) return nullptr;
        const bool nccl = work.is_trial() || device_->group().way() == DeviceGroup::Way::Nccl;
        topology_.devices = nccl ? Topology::Devices::Nccl : Topology::Devices::Host;
    }
    try {
        const Path& path = choose(headers, topology_);
        if (path.make != make_push_list) work.guests_.clear();  // the path takes the tensors themselves
        Operation operation{*group_, work.request_, headers, work.result_, fabric_.get(), work.agreement_.get()};
        if (device_) device_->take_part(work, operation, path);
        work.takes_one_gate_ = takes_one_gate(path);
        return path.make(operation);
    } catch (const Unsupported& error) {
        if (joined) return take_no_part();
        throw Unsupported(who() + ": " + title(work.header_) + ": " + error.what());
    }
}

Communicator::Served Communicator::take_step(Work& work, Step step) {
    const bool polled = work.polling_;
    work.polling_ = step == Step::Moved || step == Step::AwaitsLink || step == Step::AwaitsDevice;
    if (!work.polling_) note(work, polled ? Phase::Sending : Phase::Moving);
    if (step == Step::Gate) {
        ++work.gates_;
        work.gate_ = group_->arrive();
    } else if (step == Step::AwaitsDevice && work.is_trial() && work.device_->issued) {
        return Served::Done;  // DeviceOpening completes it
    } else if (step == Step::AwaitsLink || step == Step::AwaitsDevice) {
        return Served::Polling;
    } else if (step == Step::Done) {
        work.stage_ = Work::Stage::Moved;
        return complete(work);
    }
    return Served::Moved;
}

Communicator::Served Communicator::complete(Work& work) {
    if (fabric_ && !work.agreement_->all_small()) {
        // A host that gave up first sends a notice, and then possibly wrong data. So notices that are on their way are
        // read before the result counts.
        work.polling_ = !epoch_.fabric->notices().read(*epoch_.group);
        if (group_->stops()) throw Aborted(group_->abort_reason());
        if (work.polling_) return Served::Polling;
    }
    if (work.header_.kind == OpKind::Join && work.result_.last_joined < 0 &&
        work.origin_ != Work::Origin::JoinedForOnce) {
        if (device_) device_->launch_for_joined(work);
        begin(work);  // the others called another operation; take part until all have joined
        return Served::Moved;
    }
    // Another rank may have given up after this one had all headers.
    if (fabric_ && work.header_.kind == OpKind::Commit && !group_->decide(work.header_.sequence))
        throw Aborted(group_->abort_reason());
    end(work);
    return Served::Done;
}

// Records the phase that ends now; the next one begins.
void Communicator::note(Work& work, Phase phase) {
    Recorder& recorder = *epoch_.recorder;
    const std::int64_t now = recorder.now();
    const int last = phase == Phase::Waiting ? group_->last_to_come() : -1;
    if (phase == Phase::Waiting && !fabric_ && work.last_ < 0) work.last_ = last;  // another host may have come later
    recorder.record(phase, work.mark_, now, work.header_, number_, last);
    work.mark_ = now;
}

void Communicator::note_caller(const Work& work, std::int64_t begin) const {
    Recorder& recorder = *epoch_.recorder;
    recorder.record(Phase::Held, begin, recorder.now(), work.header_, number_, -1);
    const std::int64_t from = std::max(work.blocked_, begin);
    if (work.blocked_ == 0 || work.released_ <= from) return;
    recorder.add_waited(work.released_ - from);
    recorder.record(Phase::HeldUp, from, work.released_, work.header_, number_, work.last_);
}

void Communicator::end(Work& work) {
    const Header& header = work.header_;
    const bool writes = header.kind == OpKind::Allreduce || header.kind == OpKind::Broadcast;
    for (const Work::Guest& guest : work.guests_) std::memcpy(guest.to, guest.copy, guest.bytes);
    if (fabric_ && work.bounce_ && writes && header.op != ReduceOp::Adasum)
        copy_out(work.request_.pieces, 0, header.count, static_cast<const std::byte*>(work.bounce_->data()),
                 item_size(header.dtype));
    group_->set_state(RankState::Idle);
    if (work.device_) {
        device_->launch(work.shared_from_this());
    } else {
        work.finish(nullptr);
    }
}

}  // namespace ring
