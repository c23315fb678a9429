// The queue of a group's operations: carrying them out, waiting for them, and leaving the group.
#include "ring/communicator/communicator.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/text.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/communicator/named_lane.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr int kLaneNumber = 1 << 16;  // above the numbers of groups

std::exception_ptr dropped(const std::string& who, const Work& work) {
    return std::make_exception_ptr(Aborted(who + ": " + work.describe() + " was dropped with its communicator"));
}

}  // namespace

Communicator::Communicator(std::vector<int> ranks, int index, std::shared_ptr<HostGroup> group,
                           std::shared_ptr<Fabric> fabric, Generation generation)
    : index_(index),
      group_(std::move(group)),
      fabric_(std::move(fabric)),
      topology_{std::move(ranks), fabric_ ? fabric_->hosts() : 1},
      generation_(std::move(generation)),
      number_(generation_.recorder->next_group()),
      log_group_(generation_.recorder->log_group(topology_.ranks, generation_.number, group_ == generation_.group)),
      point_to_point_(std::make_unique<PointToPoint>(PointToPoint::Place{group_, fabric_, generation_.fabric,
                                                                         topology_.ranks, index_, generation_.recorder,
                                                                         generation_.standstill, number_})),
      named_(std::make_unique<NamedLane>(*this)),
      device_(generation_.devices ? std::make_unique<DeviceSide>(*this, generation_.devices) : nullptr) {
    if (fabric_) group_->tickets().decide_between_hosts();
    generation_.progress->add(this);
}

Communicator::Communicator(const Communicator& owner, std::shared_ptr<HostGroup> group, std::shared_ptr<Fabric> fabric)
    : index_(owner.index_),
      group_(std::move(group)),
      fabric_(std::move(fabric)),
      // Without the agreement on devices: another thread may be writing it in an operation of the owner.
      topology_{owner.topology_.ranks, owner.topology_.hosts, Topology::Devices::None},
      generation_(owner.generation_),
      number_(kLaneNumber + owner.number_),
      device_(generation_.devices ? std::make_unique<DeviceSide>(*this, generation_.devices) : nullptr) {
    if (fabric_) group_->tickets().decide_between_hosts();
}

Communicator::~Communicator() {
    if (!ring_memory()->owned()) return;  // a forked process: its copy of the progress thread does not exist
    generation_.progress->remove(this);
    point_to_point_.reset();
    const std::deque<std::shared_ptr<Work>>& queued = queue_.entries();
    if (!queued.empty() || (named_ && !named_->is_quiet())) {
        // Other ranks may be writing to the tensors of an operation that has begun.
        group_->abort(FixedText("rank %d dropped a communicator with operations under way", rank()));
        announce_abort();
    }
    if (!queued.empty()) keep_tensors_until_quiet(*queued.front());  // only the front has begun
    // Threads that wait for a queued operation must learn that no thread will carry it out.
    for (const auto& work : queued) {
        if (work->started() && complete_in_spite(*work)) {
            work->finish(nullptr);
            continue;
        }
        std::exception_ptr error;
        try {
            error = dropped(who(), *work);
        } catch (...) {
            error = std::current_exception();
        }
        if (!device_ || !device_->fail(work, error)) work->finish(std::move(error));
    }
    device_.reset();
    leave();
    if (generation_.devices && group_->aborted())
        generation_.progress->exclusively([&] { generation_.devices->abandon(); });
}

void Communicator::leave() noexcept {
    if (named_) named_->leave();
    const bool is_first = !group_->left();
    const bool is_last = group_->leave();
    if (fabric_ && !group_->aborted()) {
        if (is_first) fabric_->notices().announce_leaving();
        if (is_last) fabric_->notices().announce_departure(sequence_);
        if (is_last && named_) named_->announce_departure();
    }
    if (is_first && group_ == generation_.group) generation_.progress->leave_groups();
}

// Leaves the group when its generation is left, so that other hosts learn of it; an operation under way ends first.
void Communicator::leave_with_generation() noexcept {
    if (queue_.is_idle([&] { return !named_ || named_->is_quiet(); })) leave();
}

std::shared_ptr<Work> Communicator::run(Request request, double timeout, const Interruption& check) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    run(work, check);
    return work;
}

std::shared_ptr<Work> Communicator::call(Request request, double timeout, const Interruption& check) {
    const Spending spending(*generation_.recorder);
    std::shared_ptr<Work> work = run(std::move(request), timeout, check);
    note_caller(*work, spending.begin());
    work->get();
    return work;
}

std::uint64_t Communicator::commit(std::string name, std::uint64_t newest, double timeout, const Interruption& check,
                                   std::uint32_t site) {
    Request request;
    request.kind = OpKind::Commit;
    request.name = std::move(name);
    request.layout = newest;
    request.site = site;
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    if (fabric_) work->patience = kCommitPatience;
    const Spending spending(*generation_.recorder);
    // The messages of this host may let another host commit. So an interrupt ends the generation and then waits for the
    // outcome.
    std::exception_ptr interrupt;
    const Interruption patient = [&] {
        try {
            check();
        } catch (...) {
            if (interrupt) throw;
            interrupt = std::current_exception();
            abort(FixedText("rank %d was interrupted in %s", rank(), to_string(OpKind::Commit)));
        }
    };
    try {
        run(work, fabric_ && check ? patient : check);
    } catch (...) {
        if (!work->has_succeeded()) throw;
    }
    if (interrupt && !work->has_succeeded()) std::rethrow_exception(interrupt);
    note_caller(*work, spending.begin());
    work->get();
    return work->result.newest;
}

void Communicator::run(const std::shared_ptr<Work>& work, const Interruption& check) {
    std::optional<NamedLane::Joining> joining;
    if (work->request.kind == OpKind::Join) {
        // Hosts share at most a wall clock; the ranks of one host share a monotonic clock.
        work->header.join_called = fabric_ ? wall_clock_ns() : monotonic_ns();
        joining.emplace(*named_);
        wait_for_names(work->request, check);
    }
    const auto check_turn = [&](bool within) {
        check_open(work->request);
        if (within)
            throw invalid(work->request,
                          "this thread is in another operation of this group (it runs a signal handler "
                          "inside it); call it after that operation");
    };
    // NCCL needs one thread that launches; a joined rank may have to launch too.
    const bool queues = work->device || (device_ && joining);
    if (queue_.enter(work, queues, check_turn, [&] { generation_.progress->begin(); })) {
        carry_out(*work, check);
        end_turn();
        if (fabric_ && generation_.group->left()) leave_with_generation();
    } else {
        generation_.progress->nudge();
        wait_launched(*work, 0, check);
    }
    if (joining) joining->end(*work);
}

void Communicator::carry_out(Work& work, const Interruption& check) {
    try {
        if (!work.started()) begin(work);
        Served served = Served::Moved;
        while (served != Served::Done) {
            const bool polling = work.machine.polling;
            wait_until(
                group_->bell(), polling ? group_->spin().polling() : group_->spin(),
                [&] {
                    served = attempt(work);
                    return served == Served::Moved || served == Served::Done || work.machine.polling != polling;
                },
                [&] {
                    generation_.standstill->program_waits();
                    check_waiting(work, check);
                },
                polling ? kPoll : kSleep);
        }
    } catch (...) {
        fail(work, std::current_exception());
    }
}

// Operations that this rank has posted by name end before it joins: joined ranks add nothing to them.
void Communicator::wait_for_names(const Request& request, const Interruption& check) {
    generation_.progress->begin();
    generation_.progress->nudge();
    const auto ended = [&] { return !named_->has_own(); };
    try {
        wait_until(idle_, group_->spin(), ended, [&] {
            generation_.standstill->program_waits();
            if (check) check();
        });
    } catch (...) {
        abort(FixedText("rank %d was interrupted in %s", rank(), to_string(request.kind)));
        wait_until(idle_, group_->spin(), ended, [] {});
        throw;
    }
}

std::shared_ptr<Work> Communicator::enqueue(Request request, double timeout, std::shared_ptr<const Work> first) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    work->first = std::move(first);
    generation_.progress->begin();
    queue_.enter(work, true, [&](bool) { check_open(work->request); }, [] {});
    generation_.progress->nudge();
    return work;
}

std::shared_ptr<Work> Communicator::start(Request request, double timeout, std::shared_ptr<const Work> first) {
    if (request.name.empty() || in_order_.load(std::memory_order_relaxed))
        return enqueue(std::move(request), timeout, std::move(first));
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    work->first = std::move(first);
    generation_.progress->begin();
    queue_.exclusively([&] {
        check_open(work->request);
        named_->post(work);
    });
    generation_.progress->nudge();
    return work;
}

Communicator::Served Communicator::serve() {
    return std::max({serve_queue(), named_->serve(), device_ ? device_->serve() : Served::Idle});
}

Communicator::Served Communicator::serve_queue() {
    const std::shared_ptr<Work> work = queue_.take_front([](const Work&) { return true; });
    if (!work) return Served::Idle;
    const Served served = advance(*work);
    queue_.end_turn(served == Served::Done);
    if (served == Served::Done) {
        idle_.ring();
        if (fabric_ && generation_.group->left()) leave_with_generation();
    }
    return served;
}

Communicator::Served Communicator::advance(Work& work) {
    try {
        if (device_ && device_->is_agreeing(work)) return device_->serve_agreement();
        if (!work.started() && device_ && !device_->fetch(work)) {
            if (group_->aborted()) throw Aborted(group_->abort_reason());
            return Served::Polling;
        }
        if (!work.started()) begin(work);
        const Served served = attempt(work);
        if (served == Served::Blocked || served == Served::Polling) check_waiting(work, nullptr);
        return served;
    } catch (...) {
        fail(work, std::current_exception());
        return Served::Done;
    }
}

void Communicator::wait(Work& work, double timeout, const Interruption& check) {
    wait_until_ready(work, &Work::done, timeout, check);
}

void Communicator::wait_launched(Work& work, double timeout, const Interruption& check) {
    wait_until_ready(work, &Work::launched, timeout, check);
}

void Communicator::wait_until_ready(Work& work, bool (Work::*ready)() const, double timeout,
                                    const Interruption& check) {
    // No thread carries it out here: a fork copies no threads.
    if (!ring_memory()->owned() && !work.done())
        throw InvalidArgument(who() + ": a forked process cannot wait for an operation of its parent");
    if (look(work, group_->spin().yield ? kFewLooks : kManyLooks)) return;
    generation_.progress->end_watch();
    const std::int64_t deadline = deadline_after(timeout);
    const auto settle = [&] {
        // The operation sees the abort at its next step and releases the tensors; only then may the caller continue.
        wait_until(work.bell(), group_->spin(), [&] { return work.done(); }, [] {});
    };
    try {
        wait_until(
            work.bell(), group_->spin(), [&] { return (work.*ready)(); },
            [&] {
                generation_.standstill->program_waits();
                if (check) check();
                if (is_past(deadline))
                    throw Timeout(who() + ": " + to_string(work.request.kind) + " '" + work.request.name +
                                  "' was not done after " + seconds_text(timeout));
            });
    } catch (const Timeout& late) {
        abort(late.what());
        settle();
        throw;
    } catch (...) {
        abort(FixedText("rank %d was interrupted while it waited for %s '%s'", rank(), to_string(work.request.kind),
                        work.request.name.c_str()));
        settle();
        throw;
    }
}

std::pair<std::string, std::string> Communicator::device_transport() const {
    return device_ ? device_->transport() : std::pair<std::string, std::string>{};
}

void Communicator::check_open(const Request& request) const {
    if (closed() || generation_.group->left()) throw invalid(request, "this communicator is closed");
}

Communicator::Counts Communicator::counts() const {
    Counts counts{group_->operations(), group_->gates(), {}};
    for (int host = 0; fabric_ && host < fabric_->hosts(); ++host) counts.sent.push_back(fabric_->sent(host));
    return counts;
}

void Communicator::close(const Interruption& check) {
    if (!ring_memory()->owned()) return;
    const bool within = queue_.close();
    named_->begin_close();
    generation_.progress->nudge();
    const bool ends_generation = generation_.devices && group_ == generation_.group;
    const auto idle = [&] {
        return queue_.is_idle([&] {
            return named_->is_quiet() && (!device_ || device_->is_quiet()) &&
                   (!ends_generation ||
                    generation_.devices->under_way() == 0);  // also those of groups that are never closed
        });
    };
    if (within) {
        abort(FixedText("rank %d closed the communicator within an operation", rank()));
    } else {
        try {
            wait_until(idle_, group_->spin(), idle, [&] {
                generation_.standstill->program_waits();
                if (check) check();
            });
        } catch (...) {
            abort(FixedText("rank %d was interrupted while it closed a communicator", rank()));
            wait_until(idle_, group_->spin(), idle, [] {});
            leave();
            throw;
        }
    }
    if (point_to_point_) point_to_point_->close(nullptr);
    leave();
    if (!generation_.devices) return;
    if (const std::exception_ptr unknown = generation_.devices->late_failure()->take()) std::rethrow_exception(unknown);
}

void Communicator::check_member(OpKind kind, int member) const {
    Request request;
    request.kind = kind;
    if (!ring_memory()->owned()) throw invalid(request, "a forked process cannot use its parent's communicator");
    check_open(request);
    if (kind == OpKind::Receive && member == PointToPoint::kAny) return;
    if (member < 0 || member >= size())
        throw invalid(request, "rank " + std::to_string(member) + " is not in this group of " + std::to_string(size()));
}

std::shared_ptr<Message> Communicator::send(int to, int tag, const void* data, std::uint64_t count, DType dtype,
                                            double timeout, bool attended) {
    check_member(OpKind::Send, to);
    if (!attended || point_to_point_->polls()) generation_.progress->begin();
    auto message = point_to_point_->send(to, tag, data, count, dtype, timeout, attended);
    if (point_to_point_->unattended()) generation_.progress->nudge();
    return message;
}

std::shared_ptr<Message> Communicator::receive(int from, int tag, void* data, std::uint64_t count, DType dtype,
                                               double timeout, bool attended) {
    check_member(OpKind::Receive, from);
    if (!attended || point_to_point_->polls()) generation_.progress->begin();
    auto message = point_to_point_->receive(from, tag, data, count, dtype, timeout, attended);
    if (point_to_point_->unattended()) generation_.progress->nudge();
    return message;
}

void Communicator::wait(Message& message, double timeout, const Interruption& check) {
    try {
        point_to_point_->wait(message, timeout, [&] {
            generation_.standstill->program_waits();
            read_notices();
            if (check) check();
        });
    } catch (...) {
        announce_abort();
        throw;
    }
}

// Reads notices of aborts and departures on other hosts.
void Communicator::read_notices() {
    if (generation_.fabric) generation_.fabric->notices().read(*generation_.group);
    if (fabric_ && fabric_ != generation_.fabric) fabric_->notices().read(*group_);
}

Communicator::Served Communicator::serve_messages() {
    if (!point_to_point_ || !point_to_point_->unattended()) return Served::Idle;
    if (point_to_point_->advance()) return Served::Moved;
    const std::int64_t now = monotonic_ns();
    if (now >= next_look_) {
        next_look_ = now + kCheckEvery;
        try {
            read_notices();
        } catch (const std::exception& error) {
            group_->abort(error.what());
        }
        point_to_point_->look();
        announce_abort();
    }
    return point_to_point_->polls() ? Served::Polling : Served::Blocked;
}

}  // namespace ring
