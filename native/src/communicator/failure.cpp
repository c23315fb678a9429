// How an operation fails: the checks of a waiting rank, and how all waiting ranks learn of a failure, also when memory
// is short.
#include <algorithm>
#include <new>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/text.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/communicator/progress.hpp"
#include "ring/group/mismatch.hpp"

namespace ring {
namespace {

// After its deadline a rank leaves it to the leader of its host to say which host is silent, for so long.
constexpr std::int64_t kForLeader = 10 * kCheckEvery;

// Whether every rank learns of the error, by its next operation at the latest; an interrupt is for one rank.
bool is_of_generation(const std::exception_ptr& error) {
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

std::string Communicator::locate(const Work& work) const { return who() + ": " + describe(work.header); }

// The checks that a waiting thread makes from time to time, besides its gate and the link.
void Communicator::check_waiting(Work& work, const Interruption& check) {
    const std::int64_t now = monotonic_ns();
    if (now < work.machine.next_check) return;
    work.machine.next_check = now + kCheckEvery;
    if (check) check();
    read_notices();
    group_->check_alive(work.machine.gate, true);
    if (work.device && work.device->issued) group_->check_members();
    if (fabric_) {
        const std::vector<int> gone = ranks_of(fabric_->notices().departed(work.header.sequence));
        if (!gone.empty()) {
            group_->abort(rank_list(gone) + " left (cells or scripts ended) while others wait for them");
            throw Aborted(group_->abort_reason());
        }
    }
    warn_of_stall(work, now);
    report_wait(work);
    const bool launches = work.device && work.device->issued;
    const bool leaves_it = awaits_leader(work) && !is_past(work.deadline + kForLeader);
    if (is_past(work.deadline) && !leaves_it && (work.machine.polling || !group_->released(work.machine.gate))) {
        const std::string late =
            locate(work) + " timed out: " + (launches ? "NCCL has not launched it" : missing(work));
        group_->abort(late);
        throw Timeout(late + ". Call it on every rank of the group, or raise the timeout.");
    }
}

bool Communicator::awaits_leader(const Work& work) const {
    return work.machine.agreement && work.machine.stage == Work::Stage::Posted && work.machine.gates == 1 &&
           group_->index() != 0;
}

std::string Communicator::missing(const Work& work) const {
    if (!work.machine.polling && !awaits_leader(work)) return group_->missing(work.machine.gate);
    std::vector<int> hosts;
    if (work.machine.polling && work.machine.stage == Work::Stage::Posted && work.machine.agreement)
        hosts = work.machine.agreement->awaited_hosts();
    if (hosts.empty()) return "another host has not answered";
    std::vector<int> silent;
    for (int host : hosts)
        for (int member : fabric_->members(host)) silent.push_back(ranks()[static_cast<std::size_t>(member)]);
    const bool one = hosts.size() == 1;
    return (one ? "the host of " : "hosts of ") + rank_ranges(silent) + (one ? " has" : " have") + " not answered";
}

// "allreduce sum 'x' float32 [3] in the group of ranks 0, 2, by order"
std::string Communicator::awaited_text(const Work& work, const char* how) const {
    constexpr std::size_t kListed = 8;
    std::string group;
    for (std::size_t i = 0; i < std::min(ranks().size(), kListed); ++i)
        group += (i == 0 ? " in the group of ranks " : ", ") + std::to_string(ranks()[i]);
    if (ranks().size() > kListed) group = " in a group of " + std::to_string(size());
    return describe_fully(work.header) + (group_ == generation_.group ? "" : group) + how;
}

// Operations of the named lane report their waits in `NamedLane::check`; here all ranks have called them.
void Communicator::report_wait(Work& work) const {
    const bool lacks_calls = work.machine.stage == Work::Stage::Posted && !work.machine.algorithm;
    if (lacks_calls && named_ != nullptr) {
        work.machine.watched = generation_.standstill;
        generation_.standstill->awaits(&work, StandstillWatch::key_by_order(log_group_, work.header.sequence),
                                       static_cast<std::uint32_t>(size()), awaited_text(work, kByOrder));
    } else if (!lacks_calls || work.origin != Work::Origin::Caller) {
        work.machine.watched = generation_.standstill;
        generation_.standstill->moves(&work);
    }
}

// One of the waiting ranks of a host prints the warning. A rank that has joined waits on purpose.
void Communicator::warn_of_stall(Work& work, std::int64_t now) const {
    const double limit = group_->options().stall_warning;
    if (work.machine.stalled_at != work.machine.gate) {
        work.machine.stalled_at = work.machine.gate;
        work.machine.since = now;
    }
    const double waited = static_cast<double>(now - work.machine.since) * 1e-9;
    if (limit <= 0.0 || waited < limit || work.machine.warned || named_ == nullptr || work.header.kind == OpKind::Join)
        return;
    work.machine.warned = true;
    if (awaits_leader(work)) return;
    int first = 0;
    while (!work.machine.polling && !group_->has_arrived(first, work.machine.gate)) ++first;
    if (first != group_->index() || (!work.machine.polling && group_->released(work.machine.gate))) return;
    warn(locate(work) + " has waited " + seconds_text(waited) + ": " + missing(work));
}

// The error of an operation that ends with the generation.
std::exception_ptr Communicator::stopped(const Work& work, const char* reason) const {
    if (group_->aborted_by_mismatch() && (work.started() || work.machine.since != 0))
        return std::make_exception_ptr(Mismatch(who() + ": " + title(work.header) + ": " + reason));
    return std::make_exception_ptr(Aborted(locate(work) + " stopped because " + reason));
}

// Aborts the generation unless it is aborted already, and adds this rank's operation to `error`. False where the group
// continues.
bool Communicator::explain(const Work& work, std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted& aborted) {
        error = stopped(work, aborted.what());
    } catch (const Mismatch&) {
        return false;
    } catch (const Unsupported&) {
        return false;
    } catch (const Timeout&) {
    } catch (const DeviceError& device) {
        if (device_) device_->stream().note(device);
        const std::string why = who() + " stopped in " + describe(work.header) + ": " + device.what();
        group_->abort(why);
        error = std::make_exception_ptr(Aborted(why));
    } catch (const PeerLost& lost) {
        const std::string why = who() + " stopped in " + describe(work.header) + ": " + lost.what();
        group_->abort(why);
        error = std::make_exception_ptr(Aborted(why));
    } catch (const std::exception& other) {
        group_->abort(who() + " stopped in " + describe(work.header) + ": " + other.what());
    } catch (...) {
        group_->abort(who() + " was interrupted in " + describe(work.header));
    }
    return true;
}

// After an abort: completes an operation that other ranks may have completed, and rules out any other.
bool Communicator::complete_in_spite(Work& work) noexcept {
    const std::uint64_t sequence = work.header.sequence;
    if (fabric_ || work.machine.gates > 0) return group_->rule_out(sequence) && work.header.kind == OpKind::Commit;
    if (!group_->all_have_come(work.machine.gate) && !group_->rule_out(sequence)) return false;
    try {
        if (!work.machine.algorithm) work.machine.algorithm = make_algorithm(work, group_->headers(sequence));
        if (work.machine.takes_one_gate && group_->decide(sequence)) {
            work.machine.algorithm->advance(0);
            return work.header.kind != OpKind::Join || work.result.last_joined >= 0;
        }
    } catch (...) {  // they did not agree, or this rank has no memory
    }
    group_->rule_out(sequence);
    return false;
}

void Communicator::fail(Work& work, std::exception_ptr error) noexcept {
    bool ended = !work.is_check();
    try {
        if (ended) ended = explain(work, error);
    } catch (...) {  // the error stays what it was
        group_->abort(FixedText("rank %d ran out of memory in %s", rank(), to_string(work.request.kind)));
    }
    // Only after the abort, so that a rank that finds the operation ruled out has a reason to report.
    const bool has_completed = ended && work.started() && complete_in_spite(work);
    if (ended) {
        announce_abort();
        work.machine.algorithm.reset();  // cancels its transfers
        work.machine.agreement.reset();
        keep_tensors_until_quiet(work);
    }
    group_->set_state(RankState::Idle);
    if (has_completed && (work.header.kind == OpKind::Commit || is_of_generation(error))) {
        work.finish(nullptr);
    } else if (!device_ || !device_->fail(work.shared_from_this(), error))
        work.finish(std::move(error));
    if (ended && generation_.fabric) generation_.fabric->notices().send_due();  // there may be memory now
}

// Waits until no rank touches the tensors of a failed operation, which then belong to the caller again. If a rank is
// stopped while it touches them, their memory is not reused.
void Communicator::keep_tensors_until_quiet(const Work& work) noexcept {
    if (group_->wait_quiet()) return;
    const auto keep = [&](std::uint64_t offset) {
        if (offset != kNowhere) ring_memory()->keep(offset, group_->quiet());
    };
    keep(work.header.input);
    keep(work.header.output);
    if (work.request.pieces.size() < 2) return;
    for (const Piece& piece : work.request.pieces) {
        keep(ring_memory()->offset_of(piece.input, 1));
        keep(ring_memory()->offset_of(piece.output, 1));
    }
}

void Communicator::announce_abort() noexcept {
    if (generation_.fabric && group_->aborted() && group_->claim_announcement())
        generation_.fabric->notices().announce_abort(group_->abort_reason(), group_->aborted_by_mismatch());
}

void Communicator::abort(std::string_view reason) noexcept {
    if (!ring_memory()->owned()) return;  // the generation belongs to the parent process, which still uses it
    if (generation_.devices) generation_.devices->late_failure()->tell();
    group_->abort(reason);
    announce_abort();
    group_->bell().ring();
    generation_.progress->nudge();
}

}  // namespace ring
