#include "ring/communicator.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "ring/progress.hpp"

namespace ring {
namespace {

constexpr std::int64_t kCheckEvery = 50'000'000;  // ns

std::uint64_t hash_words(const std::vector<int>& values) {
    std::uint64_t hash = 1469598103934665603ull;  // FNV-1a
    for (int value : values) hash = (hash ^ static_cast<std::uint64_t>(value)) * 1099511628211ull;
    return hash;
}

std::int64_t deadline_after(double seconds) {
    return seconds > 0 ? monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9) : 0;
}

std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
}

}  // namespace

void Work::get() const {
    if (error_) std::rethrow_exception(error_);
}

void Work::finish(std::exception_ptr error) {
    error_ = std::move(error);
    algorithm_.reset();
    state_.store(error_ ? State::Failed : State::Done, std::memory_order_seq_cst);
    bell_.ring();
}

std::shared_ptr<Communicator> Communicator::open(std::shared_ptr<Domain> domain, HostGroup::Members members,
                                                 std::uint64_t epoch, double timeout, const Interruption& check) {
    const int leader = members.local.front();
    RankSlot& slot = domain->slot(leader);
    const std::string who = "rank " + std::to_string(members.ranks[static_cast<std::size_t>(members.index)]);
    const std::string whose = "rank " + std::to_string(members.ranks.front());
    if (members.index == 0) {
        slot.epoch_block.store(HostGroup::reserve(domain, members.local), std::memory_order_release);
        slot.epoch.store(epoch, std::memory_order_seq_cst);
        for (int member : members.local) domain->slot(member).bell.ring();
    } else {
        const std::int64_t deadline = deadline_after(timeout);
        wait_until(
            domain->slot(domain->local_rank()).bell, SpinPolicy{},
            [&] { return slot.epoch.load(std::memory_order_seq_cst) >= epoch; },
            [&] {
                if (check) check();
                if (domain->dead(leader)) throw Aborted(who + " waits to open a run and " + whose + " has died");
                if (deadline != 0 && monotonic_ns() > deadline)
                    throw Timeout(who + " waited " + seconds_text(timeout) + " for " + whose + " to open the run");
            });
        if (slot.epoch.load(std::memory_order_acquire) > epoch)
            throw Aborted(who + " came to a run that " + whose + " has already left");
    }
    const std::uint64_t block = slot.epoch_block.load(std::memory_order_acquire);
    auto group = std::make_shared<HostGroup>(domain, block, std::move(members));
    auto progress = std::make_shared<Progress>(group->bell(), group->spin());
    std::shared_ptr<Communicator> self(new Communicator(group, group, std::move(progress)));
    Request meet;
    meet.name = "open";
    self->run(std::move(meet), timeout, check)->get();
    return self;
}

Communicator::Communicator(std::shared_ptr<HostGroup> group, std::shared_ptr<HostGroup> epoch,
                           std::shared_ptr<Progress> progress)
    : group_(std::move(group)), epoch_(std::move(epoch)), progress_(std::move(progress)) {
    progress_->add(this);
}

Communicator::~Communicator() {
    progress_->remove(this);
    // Whoever still waits for a queued operation must learn that nobody will carry it out.
    for (const auto& work : queue_)
        work->finish(std::make_exception_ptr(Aborted(locate(*work) + " was dropped with its communicator")));
    group_->leave();
}

std::string Communicator::locate(const Work& work) const {
    return "rank " + std::to_string(group_->rank()) + ": " + describe(work.header_);
}

void Communicator::validate(const Request& request) const {
    const std::string where = "rank " + std::to_string(group_->rank()) + ": " + to_string(request.kind) +
                              (request.name.empty() ? "" : " '" + request.name + "'") + ": ";
    if (closed()) throw InvalidArgument(where + "this communicator is closed");
    if (request.shape.size() > kMaxDims)
        throw InvalidArgument(where + "a tensor has " + std::to_string(request.shape.size()) +
                              " dimensions; at most 8 travel. Flatten it.");
    if (request.kind == OpKind::Broadcast && (request.root < 0 || request.root >= size()))
        throw InvalidArgument(where + "root " + std::to_string(request.root) + " is not in this group of " +
                              std::to_string(size()));
    if (request.kind == OpKind::ReduceScatter && request.shape.empty())
        throw InvalidArgument(where + "a tensor without dimensions has no rows to scatter");
    if (request.op == ReduceOp::Adasum)
        throw InvalidArgument(where + "adasum is not implemented for this operation");
    if (request.kind == OpKind::Alltoall) {
        std::int64_t sum = 0;
        for (std::int64_t split : request.splits) {
            if (split < 0) throw InvalidArgument(where + "a split is negative");
            sum += split;
        }
        if (request.splits.size() != static_cast<std::size_t>(size()) ||
            static_cast<std::uint64_t>(sum) != request.count())
            throw InvalidArgument(where + "splits must be one per rank and add up to the tensor's " +
                                  std::to_string(request.count()) + " elements");
    }
}

std::shared_ptr<Work> Communicator::make_work(Request request, double timeout) const {
    validate(request);
    auto work = std::make_shared<Work>();
    work->deadline_ = deadline_after(timeout);
    Header& header = work->header_;
    header.kind = request.kind;
    header.dtype = request.dtype;
    header.op = request.op;
    header.prescale = request.prescale;
    header.postscale = request.postscale;
    if (request.root >= 0) header.root = ranks()[static_cast<std::size_t>(request.root)];
    header.tensors = static_cast<std::int32_t>(request.pieces.size());
    header.count = request.count();
    header.layout = request.layout;
    header.dims = static_cast<std::uint8_t>(request.shape.size());
    std::copy(request.shape.begin(), request.shape.end(), header.shape);
    std::strncpy(header.name, request.name.c_str(), kNameBytes - 1);
    if (request.pieces.size() == 1) {
        const Piece& piece = request.pieces.front();
        const std::size_t bytes = piece.count * item_size(request.dtype);
        header.input = domain()->offset_of(piece.input, bytes);
        header.output = domain()->offset_of(piece.output, bytes);
    }
    if (request.kind == OpKind::Group) {
        header.count = request.members.size();
        header.layout = hash_words(request.members);
        if (!request.members.empty() && request.members.front() == index()) {
            std::vector<int> local;
            for (int member : request.members) local.push_back(group_->local_rank(member));
            header.input = HostGroup::reserve(domain(), local);
        }
    }
    work->request_ = std::move(request);
    return work;
}

void Communicator::begin(Work& work) {
    if (group_->aborted()) throw Aborted(group_->abort_reason());
    Header& header = work.header_;
    header.sequence = ++sequence_;
    if (header.kind == OpKind::Join && header.joined_at == 0) header.joined_at = header.sequence;
    header.is_inline = fill_inline(*group_, work.request_, header.sequence) ? 1 : 0;
    if (header.kind == OpKind::Alltoall)
        std::copy(work.request_.splits.begin(), work.request_.splits.end(),
                  group_->splits(index(), header.sequence));
    group_->post(header);
    group_->set_state(RankState::Waiting);
    work.started_ = true;
    work.step_ = 0;
    work.gate_ = group_->arrive();
}

bool Communicator::advance(Work& work) {
    if (!group_->released(work.gate_)) {
        group_->check_alive(work.gate_, false);
        return false;
    }
    if (!work.algorithm_) {
        const std::vector<Header> headers = group_->headers(work.header_.sequence);
        const std::string mismatch = find_mismatch(headers, ranks());
        if (!mismatch.empty()) throw Mismatch(locate(work) + ": " + mismatch);
        work.algorithm_ = make_algorithm(*group_, work.request_, headers, work.result_);
    }
    bool last = false;
    {
        const HostGroup::Moving moving(*group_);
        last = work.algorithm_->step(work.step_++);
    }
    if (!last) {
        work.gate_ = group_->arrive();
        return false;
    }
    if (work.header_.kind == OpKind::Join && work.result_.last_joined < 0) {
        work.algorithm_.reset();
        begin(work);  // the others did something else; keep taking part until all have joined
        return false;
    }
    group_->set_state(RankState::Idle);
    return true;
}

// What a waiting thread does every now and then, beyond looking at its gate.
void Communicator::check_waiting(Work& work) {
    const std::int64_t now = monotonic_ns();
    if (now < work.next_check_) return;
    work.next_check_ = now + kCheckEvery;
    group_->check_alive(work.gate_, true);
    if (work.deadline_ != 0 && now > work.deadline_ && !group_->released(work.gate_)) {
        const std::string late = locate(work) + " did not complete in time: " + group_->missing(work.gate_) +
                                 " did not come";
        group_->abort(late);
        throw Timeout(late + ". Call it on every rank of the group, or raise the timeout.");
    }
}

void Communicator::fail(Work& work, std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted& aborted) {
        error = std::make_exception_ptr(Aborted(locate(work) + " stopped because " + aborted.what()));
    } catch (const Mismatch&) {
        group_->set_state(RankState::Idle);
        work.finish(error);
        return;  // the group lives on
    } catch (const Timeout&) {
    } catch (const std::exception& other) {
        group_->abort("rank " + std::to_string(group_->rank()) + " stopped in " + describe(work.header_) + ": " +
                      other.what());
    } catch (...) {
        group_->abort("rank " + std::to_string(group_->rank()) + " was interrupted in " + describe(work.header_));
    }
    group_->wait_quiet();
    group_->set_state(RankState::Idle);
    work.finish(error);
}

std::shared_ptr<Work> Communicator::run(Request request, double timeout, const Interruption& check) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (inline_active_ || !queue_.empty()) {
            queue_.push_back(work);
            lock.unlock();
            progress_->wake();
            wait(*work, 0, check);
            return work;
        }
        inline_active_ = true;
    }
    try {
        begin(*work);
        bool done = false;
        while (!done) {
            wait_until(
                group_->bell(), group_->spin(), [&] { return group_->ready(work->gate_); },
                [&] {
                    if (check) check();
                    check_waiting(*work);
                });
            done = advance(*work);
        }
        work->finish(nullptr);
    } catch (...) {
        fail(*work, std::current_exception());
    }
    bool more = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        inline_active_ = false;
        more = !queue_.empty();
    }
    if (more) progress_->wake();
    return work;
}

std::shared_ptr<Work> Communicator::start(Request request, double timeout) {
    std::shared_ptr<Work> work = make_work(std::move(request), timeout);
    enqueue(work);
    return work;
}

void Communicator::enqueue(std::shared_ptr<Work> work) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(work));
    }
    progress_->wake();
}

Communicator::Served Communicator::serve() {
    std::shared_ptr<Work> work;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (inline_active_ || queue_.empty()) return Served::Idle;
        work = queue_.front();
    }
    bool done = false;
    try {
        if (!work->started_) begin(*work);
        if (!group_->ready(work->gate_)) {
            check_waiting(*work);
            return Served::Waiting;
        }
        done = advance(*work);
        if (done) work->finish(nullptr);
    } catch (...) {
        fail(*work, std::current_exception());
        done = true;
    }
    if (done) {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.pop_front();
    }
    return Served::Advanced;
}

void Communicator::wait(Work& work, double timeout, const Interruption& check) {
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
                    throw Timeout("rank " + std::to_string(group_->rank()) + ": " + to_string(work.request_.kind) +
                                  " '" + work.request_.name + "' was not done after " + seconds_text(timeout));
            });
    } catch (const Timeout& late) {
        abort(late.what());
        settle();
        throw;
    } catch (...) {
        abort("rank " + std::to_string(group_->rank()) + " was interrupted while it waited for " +
              to_string(work.request_.kind) + " '" + work.request_.name + "'");
        settle();
        throw;
    }
}

std::shared_ptr<Communicator> Communicator::subgroup(const Work& work) const {
    const std::vector<int>& indices = work.request_.members;
    const auto own = std::find(indices.begin(), indices.end(), index());
    if (own == indices.end()) return nullptr;
    HostGroup::Members members;
    members.index = static_cast<int>(own - indices.begin());
    for (int member : indices) {
        members.local.push_back(group_->local_rank(member));
        members.ranks.push_back(ranks()[static_cast<std::size_t>(member)]);
    }
    auto group = std::make_shared<HostGroup>(domain(), work.result_.block, std::move(members), epoch_);
    return std::shared_ptr<Communicator>(new Communicator(std::move(group), epoch_, progress_));
}

void Communicator::abort(const std::string& reason) {
    group_->abort(reason);
    group_->bell().ring();
    progress_->nudge();
}

void Communicator::close(const Interruption& check) {
    std::shared_ptr<Work> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!queue_.empty()) last = queue_.back();
    }
    if (last) wait(*last, 0, check);
    closed_.store(true, std::memory_order_release);
    group_->leave();
}

}  // namespace ring
