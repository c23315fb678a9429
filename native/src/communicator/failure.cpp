// How an operation fails: the checks of a waiting rank, and how all waiting ranks learn of a failure, also when memory
// is short.
#include <new>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/text.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

// Of what every rank is told, by the next operation at the latest; an interrupt is for one rank.
bool is_of_epoch(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted&) {
        return true;
    } catch (const Timeout&) {
        return true;
    } catch (...) {
        return false;
    }
}

}  // namespace

std::string Communicator::locate(const Work& work) const { return who() + ": " + describe(work.header_); }

// The checks that a waiting thread makes from time to time, besides its gate and the link.
void Communicator::check_waiting(Work& work, const Interruption& check) {
    const std::int64_t now = monotonic_ns();
    if (now < work.next_check_) return;
    work.next_check_ = now + kCheckEvery;
    if (check) check();
    read_notices();
    group_->check_alive(work.gate_, true);
    if (work.device_ && work.device_->issued) group_->check_members();
    if (fabric_) {
        const std::vector<int> gone = ranks_of(fabric_->notices().departed(work.header_.sequence));
        if (!gone.empty()) {
            group_->abort(rank_list(gone) + " left (cells or scripts ended) while others wait for them");
            throw Aborted(group_->abort_reason());
        }
    }
    warn_of_stall(work, now);
    const bool launches = work.device_ && work.device_->issued;
    if (is_past(work.deadline_) && (work.polling_ || !group_->released(work.gate_))) {
        const std::string late = locate(work) + " timed out: " +
                                 (launches        ? "NCCL has not launched it"
                                  : work.polling_ ? "another host has not answered"
                                                  : group_->missing(work.gate_));
        group_->abort(late);
        throw Timeout(late + ". Call it on every rank of the group, or raise the timeout.");
    }
}

// One of the waiting ranks of a host prints the warning. A rank that has joined waits on purpose.
void Communicator::warn_of_stall(Work& work, std::int64_t now) const {
    const double limit = group_->options().stall_warning;
    if (work.stalled_at_ != work.gate_) {
        work.stalled_at_ = work.gate_;
        work.since_ = now;
    }
    const double waited = static_cast<double>(now - work.since_) * 1e-9;
    if (limit <= 0.0 || waited < limit || work.warned_ || named_ == nullptr || work.header_.kind == OpKind::Join)
        return;
    work.warned_ = true;
    int first = 0;
    while (!work.polling_ && !group_->has_arrived(first, work.gate_)) ++first;
    if (first != group_->index() || (!work.polling_ && group_->released(work.gate_))) return;
    warn(locate(work) + " has waited " + seconds_text(waited) + ": " +
         (work.polling_ ? "another host has not answered" : group_->missing(work.gate_)));
}

// Aborts the epoch unless it is aborted already, and adds this rank's operation to `error`. False where the group
// continues.
bool Communicator::explain(const Work& work, std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted& aborted) {
        error = std::make_exception_ptr(Aborted(locate(work) + " stopped because " + aborted.what()));
    } catch (const Mismatch&) {
        return false;
    } catch (const Unsupported&) {
        return false;
    } catch (const Timeout&) {
    } catch (const DeviceError& device) {
        if (device_) device_->group().stream().note(device);
        const std::string why = who() + " stopped in " + describe(work.header_) + ": " + device.what();
        group_->abort(why);
        error = std::make_exception_ptr(Aborted(why));
    } catch (const PeerLost& lost) {
        const std::string why = who() + " stopped in " + describe(work.header_) + ": " + lost.what();
        group_->abort(why);
        error = std::make_exception_ptr(Aborted(why));
    } catch (const std::exception& other) {
        group_->abort(who() + " stopped in " + describe(work.header_) + ": " + other.what());
    } catch (...) {
        group_->abort(who() + " was interrupted in " + describe(work.header_));
    }
    return true;
}

// Behind an abort: completes an operation that other ranks may have completed, and rules out any other.
bool Communicator::complete_in_spite(Work& work) noexcept {
    const std::uint64_t sequence = work.header_.sequence;
    if (fabric_ || work.gates_ > 0) return group_->rule_out(sequence) && work.header_.kind == OpKind::Commit;
    if (!group_->all_have_come(work.gate_) && !group_->rule_out(sequence)) return false;
    try {
        if (!work.algorithm_) work.algorithm_ = make_algorithm(work, group_->headers(sequence));
        if (work.takes_one_gate_ && group_->decide(sequence)) {
            work.algorithm_->advance(0);
            return work.header_.kind != OpKind::Join || work.result_.last_joined >= 0;
        }
    } catch (...) {  // they did not agree, or this rank has no memory
    }
    group_->rule_out(sequence);
    return false;
}

void Communicator::fail(Work& work, std::exception_ptr error) noexcept {
    bool ended = !work.is_trial();
    try {
        if (ended) ended = explain(work, error);
    } catch (...) {  // the error stays what it was
        group_->abort(FixedText("rank %d ran out of memory in %s", rank(), to_string(work.request_.kind)));
    }
    // Only after the abort, so that a rank that finds the operation ruled out has a reason to report.
    const bool has_completed = ended && work.started() && complete_in_spite(work);
    if (ended) {
        announce_abort();
        work.algorithm_.reset();  // cancels its transfers
        work.agreement_.reset();
        keep_tensors_until_quiet(work);
    }
    group_->set_state(RankState::Idle);
    if (has_completed && (work.header_.kind == OpKind::Commit || is_of_epoch(error))) {
        work.finish(nullptr);
    } else if (!device_ || !device_->fail(work.shared_from_this(), error))
        work.finish(std::move(error));
    if (ended && epoch_.fabric) epoch_.fabric->notices().send_due();  // there may be memory now
}

// After this the tensors of a failed operation belong to the caller again: no rank touches them. If a rank is stopped
// while it does, their memory is never reused.
void Communicator::keep_tensors_until_quiet(const Work& work) noexcept {
    if (group_->wait_quiet()) return;
    const auto keep = [&](std::uint64_t offset) {
        if (offset != kNowhere) domain()->keep(offset, group_->quiet());
    };
    keep(work.header_.input);
    keep(work.header_.output);
    if (work.request_.pieces.size() < 2) return;
    for (const Piece& piece : work.request_.pieces) {
        keep(domain()->offset_of(piece.input, 1));
        keep(domain()->offset_of(piece.output, 1));
    }
}

void Communicator::announce_abort() noexcept {
    if (epoch_.fabric && group_->aborted() && group_->claim_announcement())
        epoch_.fabric->notices().announce_abort(group_->abort_reason());
}

void Communicator::abort(std::string_view reason) noexcept {
    if (!domain()->owned()) return;  // the epoch belongs to the parent process, which still uses it
    if (epoch_.devices) epoch_.devices->late_failure()->tell();
    group_->abort(reason);
    announce_abort();
    group_->bell().ring();
    epoch_.progress->nudge();
}

}  // namespace ring
