#include "ring/communicator/communicator.hpp"

#include <algorithm>
#include <utility>

#include "collectives/host/algorithm_parts.hpp"
#include "collectives/inter_host/header_exchange.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr std::int64_t kCheckEvery = 50'000'000;  // ns

}  // namespace

Work::Work() = default;
Work::~Work() = default;

void Work::get() const {
    if (error_) std::rethrow_exception(error_);
}

void Work::finish(std::exception_ptr error) {
    error_ = std::move(error);
    algorithm_.reset();
    agreement_.reset();
    bounce_.reset();
    state_.store(error_ ? State::Failed : State::Done, std::memory_order_seq_cst);
    bell_.ring();
}

Communicator::Communicator(std::vector<int> ranks, int index, std::shared_ptr<HostGroup> group,
                           std::shared_ptr<Fabric> fabric, Epoch epoch)
    : ranks_(std::move(ranks)),
      index_(index),
      group_(std::move(group)),
      fabric_(std::move(fabric)),
      epoch_(std::move(epoch)),
      number_(epoch_.recorder->next_group()) {
    epoch_.progress->add(this);
}

Communicator::~Communicator() {
    if (!domain()->owned()) return;  // a forked process: its copy of the progress thread does not exist
    epoch_.progress->remove(this);
    if (!queue_.empty()) {
        // Other ranks may be writing to the tensors of an operation that has begun.
        group_->abort(who() + " dropped a communicator with operations under way");
        announce();
        let_go(*queue_.front());  // the others have not begun
    }
    // Whoever still waits for a queued operation must learn that nobody will carry it out.
    for (const auto& work : queue_)
        work->finish(std::make_exception_ptr(Aborted(locate(*work) + " was dropped with its communicator")));
    leave();
}

void Communicator::leave() {
    if (group_->leave() && fabric_ && !group_->aborted()) fabric_->announce_departure(sequence_);
}

std::string Communicator::locate(const Work& work) const { return who() + ": " + describe(work.header_); }

void Communicator::begin(Work& work) {
    if (group_->aborted()) throw Aborted(group_->abort_reason());
    Header& header = work.header_;
    header.sequence = ++sequence_;
    note(work, Phase::Queued);
    if (header.kind == OpKind::Join && header.joined_at == 0) header.joined_at = header.sequence;
    header.is_inline = fill_inline(*group_, work.request_, index(), header.sequence) ? 1 : 0;
    if ((fabric_ && header.is_inline == 0) || header.op == ReduceOp::Adasum) move_to_ring(work);
    if (header.kind == OpKind::Alltoall)
        std::copy(work.request_.splits.begin(), work.request_.splits.end(),
                  group_->splits(group_->index(), header.sequence));
    note(work, Phase::Packing);
    group_->post(header);
    group_->set_state(RankState::Waiting);
    work.started_ = true;
    work.algorithm_.reset();  // reads what the agreement holds
    work.agreement_.reset();
    work.agreed_ = false;
    work.gates_ = 0;
    work.gate_ = group_->arrive();
}

// Between hosts, whoever carries a chunk reads and writes the tensors of all ranks of its host. Adasum works on two
// copies of its own.
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
    if (!work.polling_) {
        if (!group_->ready(work.gate_)) return Served::Blocked;
        if (!group_->released(work.gate_)) {
            group_->check_alive(work.gate_, false);
            return Served::Blocked;
        }
        note(work, Phase::Waiting);
    }
    if (fabric_ && !work.agreed_) {
        if (!work.agreement_) work.agreement_ = std::make_unique<Agreement>(group_, *fabric_, work.header_.sequence);
        const HostGroup::Moving moving(*group_);
        const Step step = work.agreement_->advance(work.gates_);
        if (step != Step::Done) return take_step(work, step);
        work.agreed_ = true;
        work.gates_ = 0;
    }
    if (!work.algorithm_) {
        std::vector<Header> here;
        if (!fabric_) here = group_->headers(work.header_.sequence);
        const std::vector<Header>& headers = fabric_ ? work.agreement_->headers() : here;
        const std::string mismatch = find_mismatch(headers, ranks_);
        if (!mismatch.empty()) throw Mismatch(locate(work) + ": " + mismatch);
        work.algorithm_ = work.header_.kind == OpKind::Group ? make_group(work, headers)
                          : fabric_
                              ? make_fabric_algorithm(*group_, *fabric_, work.request_, *work.agreement_, work.result_)
                              : make_algorithm(*group_, work.request_, headers, work.result_);
    }
    const HostGroup::Moving moving(*group_);
    return take_step(work, work.algorithm_->advance(work.gates_));
}

Communicator::Served Communicator::take_step(Work& work, Step step) {
    const bool polled = work.polling_;
    work.polling_ = step == Step::Moved || step == Step::Stuck;
    if (!work.polling_) note(work, polled ? Phase::Sending : Phase::Moving);
    if (step == Step::Gate) {
        ++work.gates_;
        work.gate_ = group_->arrive();
    } else if (step == Step::Stuck) {
        return Served::Polling;
    } else if (step == Step::Done) {
        if (fabric_ && !work.agreement_->all_small()) {
            // What another host sent after it had given up may be anything; it has said before that it did.
            epoch_.fabric->read_notices(*epoch_.group);
            if (group_->aborted()) throw Aborted(group_->abort_reason());
        }
        if (work.header_.kind == OpKind::Join && work.result_.last_joined < 0) {
            begin(work);  // the others did something else; keep taking part until all have joined
            return Served::Moved;
        }
        end(work);
        return Served::Done;
    }
    return Served::Moved;
}

// The phase that ends now; the next one begins.
void Communicator::note(Work& work, Phase phase) {
    Recorder& recorder = *epoch_.recorder;
    const std::int64_t now = recorder.now();
    recorder.record(phase, work.mark_, now, work.header_, number_,
                    phase == Phase::Waiting ? group_->last_to_come() : -1);
    work.mark_ = now;
}

void Communicator::end(Work& work) {
    const Header& header = work.header_;
    const bool writes = header.kind == OpKind::Allreduce || header.kind == OpKind::Broadcast;
    if (work.bounce_ && writes && header.op != ReduceOp::Adasum)
        copy_out(work.request_.pieces, 0, header.count, static_cast<const std::byte*>(work.bounce_->data()),
                 item_size(header.dtype));
    group_->set_state(RankState::Idle);
    work.finish(nullptr);
}

// What a waiting thread does every now and then, beyond looking at its gate or the link.
void Communicator::check_waiting(Work& work, const Interruption& check) {
    const std::int64_t now = monotonic_ns();
    if (now < work.next_check_) return;
    work.next_check_ = now + kCheckEvery;
    if (check) check();
    if (epoch_.fabric) epoch_.fabric->read_notices(*epoch_.group);
    group_->check_alive(work.gate_, true);
    if (fabric_) {
        if (fabric_ != epoch_.fabric) fabric_->read_notices(*group_);
        const std::vector<int> gone = fabric_->departed(work.header_.sequence);
        if (!gone.empty()) {
            std::string text;
            for (int member : gone)
                text += (text.empty() ? "" : ", ") + std::to_string(ranks_[static_cast<std::size_t>(member)]);
            group_->abort("ranks " + text + " have left (their cell or script ended) while others wait for them");
            throw Aborted(group_->abort_reason());
        }
    }
    if (work.deadline_ != 0 && now > work.deadline_ && (work.polling_ || !group_->released(work.gate_))) {
        const std::string missing = work.polling_ ? "the other hosts" : group_->missing(work.gate_);
        const std::string late = locate(work) + " did not complete in time: " + missing + " did not come";
        group_->abort(late);
        throw Timeout(late + ". Call it on every rank of the group, or raise the timeout.");
    }
}

// Ends the epoch for what did not end it yet, and says in `error` what this rank did; false where the group lives on.
bool Communicator::explain(const Work& work, std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted& aborted) {
        error = std::make_exception_ptr(Aborted(locate(work) + " stopped because " + aborted.what()));
    } catch (const Mismatch&) {
        return false;
    } catch (const Timeout&) {
    } catch (const std::exception& other) {
        group_->abort(who() + " stopped in " + describe(work.header_) + ": " + other.what());
    } catch (...) {
        group_->abort(who() + " was interrupted in " + describe(work.header_));
    }
    return true;
}

// Whoever waits for the work must learn of it, whatever else fails on the way.
void Communicator::fail(Work& work, std::exception_ptr error) noexcept {
    bool ended = true;
    try {
        ended = explain(work, error);
    } catch (...) {
        group_->abort("out of memory");
    }
    if (work.header_.kind == OpKind::Group && work.header_.input != kNowhere)
        HostGroup::bar(*domain(), work.header_.input);
    if (ended) {
        announce();
        work.algorithm_.reset();  // gives up what is on the link
        work.agreement_.reset();
        work.result_.group.reset();
        let_go(work);
    }
    group_->set_state(RankState::Idle);
    work.finish(std::move(error));
}

// After this the tensors of an operation that has failed are its caller's again: nobody touches them, or, should a rank
// be stopped in the middle of that, they are not given to anyone else.
void Communicator::let_go(const Work& work) {
    if (group_->wait_quiet()) return;
    for (const std::uint64_t tensor : {work.header_.input, work.header_.output})
        domain()->keep(tensor, [group = group_](Domain&) { return group->quiet(); });
}

void Communicator::announce() {
    if (epoch_.fabric && group_->aborted() && group_->take_announcement())
        epoch_.fabric->announce_abort(group_->abort_reason());
}

std::shared_ptr<Work> Communicator::run(Request request, double timeout, const Interruption& check) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (inline_active_ || !queue_.empty()) {
            epoch_.progress->begin();
            queue_.push_back(work);
            lock.unlock();
            epoch_.progress->nudge();
            wait(*work, 0, check);
            return work;
        }
        inline_active_ = true;
    }
    try {
        begin(*work);
        Served served = Served::Moved;
        while (served != Served::Done) {
            const bool polling = work->polling_;
            wait_until(
                group_->bell(), polling ? group_->spin().polling() : group_->spin(),
                [&] {
                    served = attempt(*work);
                    return served == Served::Moved || served == Served::Done || work->polling_ != polling;
                },
                [&] { check_waiting(*work, check); }, polling ? kPoll : kSleep);
        }
    } catch (...) {
        fail(*work, std::current_exception());
    }
    bool more = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        inline_active_ = false;
        more = !queue_.empty();
    }
    if (more) epoch_.progress->nudge();
    return work;
}

std::shared_ptr<Work> Communicator::start(Request request, double timeout) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    epoch_.progress->begin();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(work);
    }
    epoch_.progress->nudge();
    return work;
}

Communicator::Served Communicator::serve() {
    std::shared_ptr<Work> work;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (inline_active_ || queue_.empty()) return Served::Idle;
        work = queue_.front();
    }
    Served served = Served::Done;
    try {
        if (!work->started_) begin(*work);
        served = attempt(*work);
        if (served == Served::Blocked || served == Served::Polling) check_waiting(*work, nullptr);
    } catch (...) {
        fail(*work, std::current_exception());
        served = Served::Done;
    }
    if (served == Served::Done) {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.pop_front();
    }
    return served;
}

void Communicator::wait(Work& work, double timeout, const Interruption& check) {
    // Nobody carries it out here: threads do not come along when a process is forked.
    if (!domain()->owned() && !work.done())
        throw InvalidArgument(who() + ": a forked process cannot wait for an operation of its parent");
    const std::int64_t deadline = deadline_after(timeout);
    const auto settle = [&] {
        // The operation sees the abort at its next step and releases the tensors; only then may the caller go on.
        wait_until(work.bell_, group_->spin(), [&] { return work.done(); }, [] {});
    };
    try {
        wait_until(
            work.bell_, group_->spin(), [&] { return work.done(); },
            [&] {
                if (check) check();
                if (deadline != 0 && monotonic_ns() > deadline)
                    throw Timeout(who() + ": " + to_string(work.request_.kind) + " '" + work.request_.name +
                                  "' was not done after " + seconds_text(timeout));
            });
    } catch (const Timeout& late) {
        abort(late.what());
        settle();
        throw;
    } catch (...) {
        abort(who() + " was interrupted while it waited for " + to_string(work.request_.kind) + " '" +
              work.request_.name + "'");
        settle();
        throw;
    }
}

void Communicator::abort(const std::string& reason) {
    if (!domain()->owned()) return;  // the epoch is the parent's, who goes on
    group_->abort(reason);
    announce();
    group_->bell().ring();
    epoch_.progress->nudge();
}

void Communicator::close(const Interruption& check) {
    if (!domain()->owned()) return;
    std::shared_ptr<Work> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!queue_.empty()) last = queue_.back();
    }
    if (last) wait(*last, 0, check);
    closed_.store(true, std::memory_order_release);
    leave();
}

}  // namespace ring
