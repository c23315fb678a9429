#include "ring/communicator.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "agreement.hpp"
#include "algorithm_parts.hpp"
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

std::shared_ptr<Communicator> Communicator::open(Setup setup, double timeout, const Interruption& check) {
    Domain& domain = *setup.domain;
    const std::string who = "rank " + std::to_string(setup.ranks[static_cast<std::size_t>(setup.index)]);
    std::shared_ptr<Fabric> fabric;
    HostGroup::Members members{setup.local, {}, 0, setup.ranks.size()};
    if (setup.link) {
        // Tags have room for some bits; a number that comes again is long out of use by then.
        fabric = std::make_shared<Fabric>(setup.link, setup.host_of, setup.addresses, setup.index, setup.epoch << 12);
        for (int member : fabric->members(fabric->host()))
            members.ranks.push_back(setup.ranks[static_cast<std::size_t>(member)]);
        members.index = fabric->local_index(setup.index);
    } else {
        members.ranks = setup.ranks;
        members.index = setup.index;
    }
    const std::string first = "rank " + std::to_string(members.ranks.front());
    const int leader = setup.local.front();
    RankSlot& slot = domain.slot(leader);
    if (members.index == 0) {
        const auto publish = [&](std::uint64_t block) {
            slot.epoch.store(0, std::memory_order_seq_cst);  // nobody takes this block for that of the epoch before
            slot.epoch_block.store(block, std::memory_order_seq_cst);
            slot.epoch.store(setup.epoch, std::memory_order_seq_cst);
            for (int member : setup.local) domain.slot(member).bell.ring();
        };
        try {
            publish(
                HostGroup::reserve(setup.domain, setup.local, setup.ranks.size(), fabric ? extra_bytes(*fabric) : 0));
        } catch (...) {
            publish(kNowhere);
            throw;
        }
    } else {
        const std::int64_t deadline = deadline_after(timeout);
        wait_until(
            domain.slot(domain.local_rank()).bell, SpinPolicy{},
            [&] { return slot.epoch.load(std::memory_order_seq_cst) >= setup.epoch; },
            [&] {
                if (check) check();
                if (domain.dead(leader)) throw Aborted(who + " waits to begin and " + first + " has died");
                if (deadline != 0 && monotonic_ns() > deadline)
                    throw Timeout(who + " waited " + seconds_text(timeout) + " for " + first + " to begin");
            });
    }
    const std::uint64_t block = slot.epoch_block.load(std::memory_order_seq_cst);
    if (slot.epoch.load(std::memory_order_seq_cst) != setup.epoch)
        throw Aborted(who + " came to an epoch that " + first + " has already left");
    if (block == kNowhere) throw Aborted(who + " could not begin: " + first + " has no memory for the group");
    Epoch epoch;
    epoch.group = std::make_shared<HostGroup>(setup.domain, block, std::move(members));
    epoch.fabric = fabric;
    epoch.progress = std::make_shared<Progress>(epoch.group->bell(), epoch.group->spin());
    auto group = epoch.group;
    std::shared_ptr<Communicator> self(
        new Communicator(std::move(setup.ranks), setup.index, std::move(group), std::move(fabric), std::move(epoch)));
    Request meet;
    meet.name = "begin";
    self->run(std::move(meet), timeout, check)->get();
    return self;
}

Communicator::Communicator(std::vector<int> ranks, int index, std::shared_ptr<HostGroup> group,
                           std::shared_ptr<Fabric> fabric, Epoch epoch)
    : ranks_(std::move(ranks)),
      index_(index),
      group_(std::move(group)),
      fabric_(std::move(fabric)),
      epoch_(std::move(epoch)) {
    epoch_.progress->add(this);
}

Communicator::~Communicator() {
    if (!domain()->owned()) return;  // a forked process: its copy of the progress thread does not exist
    epoch_.progress->remove(this);
    if (!queue_.empty()) {
        // Other ranks may be writing to the tensors of an operation that has begun.
        group_->abort(who() + " dropped a communicator with operations under way");
        announce();
        group_->wait_quiet();
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

void Communicator::validate(const Request& request) const {
    const auto invalid = [&](const std::string& why) {
        return InvalidArgument(who() + ": " + to_string(request.kind) +
                               (request.name.empty() ? "" : " '" + request.name + "'") + ": " + why);
    };
    if (!domain()->owned()) throw invalid("a forked process cannot use its parent's communicator");
    if (closed() || epoch_.group->left()) throw invalid("this communicator is closed");
    if (request.shape.size() > kMaxDims)
        throw invalid("a tensor has " + std::to_string(request.shape.size()) +
                      " dimensions; at most 8 travel. Flatten it.");
    if (request.kind == OpKind::Broadcast && (request.root < 0 || request.root >= size()))
        throw invalid("root " + std::to_string(request.root) + " is not in this group of " + std::to_string(size()));
    if (request.kind == OpKind::ReduceScatter && request.shape.empty())
        throw invalid("a tensor without dimensions has no rows to scatter");
    if (request.kind == OpKind::Step) {
        const Piece& piece = request.pieces.front();
        const std::size_t bytes = piece.count * sizeof(float);
        if (fabric_) throw invalid("a fused step works among the ranks of one host");
        if (request.dtype != DType::Float32 || domain()->offset_of(piece.input, bytes) == kNowhere ||
            domain()->offset_of(piece.output, bytes) == kNowhere)
            throw invalid("gradients and parameters must be float32 in ring memory");
    }
    if (request.op == ReduceOp::Adasum) throw invalid("adasum is not implemented for this operation");
    if (request.kind == OpKind::Alltoall) {
        std::int64_t sum = 0;
        for (std::int64_t split : request.splits) {
            if (split < 0) throw invalid("a split is negative");
            sum += split;
        }
        if (request.splits.size() != static_cast<std::size_t>(size()) ||
            static_cast<std::uint64_t>(sum) != request.count())
            throw invalid("splits must be one per rank and add up to the tensor's " + std::to_string(request.count()) +
                          " elements");
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
    set_name(header, request.name);
    if (request.pieces.size() == 1) {
        const Piece& piece = request.pieces.front();
        const std::size_t bytes = piece.count * item_size(request.dtype);
        header.input = domain()->offset_of(piece.input, bytes);
        header.output = domain()->offset_of(piece.output, bytes);
    }
    if (request.kind == OpKind::Group) {
        header.count = request.members.size();
        header.layout = hash_words(request.members);
        header.input = reserve_part(request.members);
    }
    work->request_ = std::move(request);
    return work;
}

// The first of the new group's members on each host reserves the block for them.
std::uint64_t Communicator::reserve_part(const std::vector<int>& members) const {
    std::vector<int> local;
    int first = -1;
    for (int member : members) {
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        if (first < 0) first = member;
        local.push_back(group_->local_rank(fabric_ ? fabric_->local_index(member) : member));
    }
    if (first != index()) return kNowhere;
    const auto fabric = fabric_ ? fabric_->part(members, 0) : nullptr;
    return HostGroup::reserve(domain(), local, members.size(), fabric ? extra_bytes(*fabric) : 0);
}

void Communicator::begin(Work& work) {
    if (group_->aborted()) throw Aborted(group_->abort_reason());
    Header& header = work.header_;
    header.sequence = ++sequence_;
    if (header.kind == OpKind::Join && header.joined_at == 0) header.joined_at = header.sequence;
    header.is_inline = fill_inline(*group_, work.request_, index(), header.sequence) ? 1 : 0;
    if (fabric_ && header.is_inline == 0) move_to_ring(work);
    if (header.kind == OpKind::Alltoall)
        std::copy(work.request_.splits.begin(), work.request_.splits.end(),
                  group_->splits(group_->index(), header.sequence));
    group_->post(header);
    group_->set_state(RankState::Waiting);
    work.started_ = true;
    work.agreement_.reset();
    work.agreed_ = false;
    work.algorithm_.reset();
    work.gates_ = 0;
    work.gate_ = group_->arrive();
}

// Between hosts, whoever carries a chunk reads and writes the tensors of all ranks of its host.
void Communicator::move_to_ring(Work& work) {
    Header& header = work.header_;
    const bool writes = header.kind == OpKind::Allreduce || header.kind == OpKind::Broadcast;
    if (header.input != kNowhere && (!writes || header.output != kNowhere)) return;
    const std::size_t item = item_size(header.dtype);
    work.bounce_.emplace(domain(), header.count * item);
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
    }
    if (fabric_ && !work.agreed_) {
        if (!work.agreement_) work.agreement_ = std::make_unique<Agreement>(*group_, *fabric_, work.header_.sequence);
        const HostGroup::Moving moving(*group_);
        const Step step = work.agreement_->advance(work.gates_);
        if (step != Step::Done) return take_step(work, step);
        work.agreed_ = true;
        work.gates_ = 0;
    }
    if (!work.algorithm_) {
        const std::vector<Header> headers =
            fabric_ ? work.agreement_->headers() : group_->headers(work.header_.sequence);
        const std::string mismatch = find_mismatch(headers, ranks_);
        if (!mismatch.empty()) throw Mismatch(locate(work) + ": " + mismatch);
        work.algorithm_ = fabric_
                              ? make_fabric_algorithm(*group_, *fabric_, work.request_, *work.agreement_, work.result_)
                              : make_algorithm(*group_, work.request_, headers, work.result_);
    }
    const HostGroup::Moving moving(*group_);
    return take_step(work, work.algorithm_->advance(work.gates_));
}

Communicator::Served Communicator::take_step(Work& work, Step step) {
    work.polling_ = step == Step::Moved || step == Step::Stuck;
    if (step == Step::Gate) {
        ++work.gates_;
        work.gate_ = group_->arrive();
    } else if (step == Step::Stuck) {
        return Served::Polling;
    } else if (step == Step::Done) {
        if (work.header_.kind == OpKind::Join && work.result_.last_joined < 0) {
            begin(work);  // the others did something else; keep taking part until all have joined
            return Served::Moved;
        }
        end(work);
        return Served::Done;
    }
    return Served::Moved;
}

void Communicator::end(Work& work) {
    const Header& header = work.header_;
    if (work.bounce_ && (header.kind == OpKind::Allreduce || header.kind == OpKind::Broadcast))
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

void Communicator::fail(Work& work, std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const Aborted& aborted) {
        error = std::make_exception_ptr(Aborted(locate(work) + " stopped because " + aborted.what()));
    } catch (const Mismatch&) {
        if (work.header_.kind == OpKind::Group && work.header_.input != kNowhere)
            HostGroup::bar(*domain(), work.header_.input);
        group_->set_state(RankState::Idle);
        work.finish(error);
        return;  // the group lives on
    } catch (const Timeout&) {
    } catch (const std::exception& other) {
        group_->abort(who() + " stopped in " + describe(work.header_) + ": " + other.what());
    } catch (...) {
        group_->abort(who() + " was interrupted in " + describe(work.header_));
    }
    if (work.header_.kind == OpKind::Group && work.header_.input != kNowhere)
        HostGroup::bar(*domain(), work.header_.input);
    announce();
    work.algorithm_.reset();  // gives up what is on the link
    work.agreement_.reset();
    group_->wait_quiet();
    group_->set_state(RankState::Idle);
    work.finish(error);
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
            queue_.push_back(work);
            lock.unlock();
            epoch_.progress->wake();
            wait(*work, 0, check);
            return work;
        }
        inline_active_ = true;
    }
    try {
        begin(*work);
        Served served = Served::Moved;
        while (served != Served::Done) {
            wait_until(
                group_->bell(), group_->spin(),
                [&] {
                    served = attempt(*work);
                    return served == Served::Moved || served == Served::Done;
                },
                [&] { check_waiting(*work, check); }, work->polling_ ? kPoll : kSleep);
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
    if (more) epoch_.progress->wake();
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
    epoch_.progress->wake();
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

std::shared_ptr<Communicator> Communicator::subgroup(const Work& work) const {
    const std::vector<int>& indices = work.request_.members;
    const auto own = std::find(indices.begin(), indices.end(), index());
    if (own == indices.end()) return nullptr;
    std::vector<int> ranks;
    HostGroup::Members members{{}, {}, 0, indices.size()};
    for (int member : indices) {
        ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        if (member == index()) members.index = static_cast<int>(members.local.size());
        members.local.push_back(group_->local_rank(fabric_ ? fabric_->local_index(member) : member));
        members.ranks.push_back(ranks.back());
    }
    std::shared_ptr<Fabric> fabric;
    // All members count operations alike, so this is the same number on each of them, and no other group's.
    if (fabric_) fabric = fabric_->part(indices, fabric_->id() * 31 + work.header_.sequence);
    auto group = std::make_shared<HostGroup>(domain(), work.result_.block, std::move(members), epoch_.group);
    return std::shared_ptr<Communicator>(new Communicator(std::move(ranks), static_cast<int>(own - indices.begin()),
                                                          std::move(group), std::move(fabric), epoch_));
}

void Communicator::abort(const std::string& reason) {
    group_->abort(reason);
    announce();
    group_->bell().ring();
    epoch_.progress->nudge();
}

void Communicator::close(const Interruption& check) {
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
