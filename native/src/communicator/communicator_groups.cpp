// Creation of communicators: generations, and groups within them.
#include <algorithm>
#include <atomic>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/text.hpp"
#include "ring/collectives/device/device_stream.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/member_group.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {

namespace {

// Unless this rank has joined, its destructor tells the ranks that wait in a generation that this rank will not join.
class Opening {
   public:
    Opening(RankSlot& own, std::uint64_t generation, int rank) : own_(own), generation_(generation), rank_(rank) {}
    ~Opening() {
        if (joined_) return;
        own_.given_up.store(std::max(own_.given_up.load(), generation_), std::memory_order_seq_cst);
        if (fabric_)
            fabric_->notices().announce_abort(FixedText("rank %d was stopped before it joined this generation", rank_));
    }
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;
    void tell_by(std::shared_ptr<Fabric> fabric) { fabric_ = std::move(fabric); }
    void joined() { joined_ = true; }

   private:
    RankSlot& own_;
    std::uint64_t generation_;
    int rank_;
    std::shared_ptr<Fabric> fabric_;
    bool joined_ = false;
};

// `fabric` is null where all `ranks` members share a host.
Room room_of(const Options& options, const RingMemory& ring_memory, const Fabric* fabric, std::size_t ranks) {
    return {ranks, inline_bytes(options, fabric ? fabric->hosts() : 1), segment_bytes(options, ring_memory),
            fabric ? extra_bytes(*fabric) : 0};
}

}  // namespace

std::shared_ptr<Communicator> Communicator::open(Setup setup, double timeout, const Interruption& check) {
    RingMemory& ring_memory = *setup.ring_memory;
    const int rank = setup.ranks[static_cast<std::size_t>(setup.index)];
    const std::string who = "rank " + std::to_string(rank);
    Opening opening(ring_memory.slot(ring_memory.local_rank()), setup.generation, rank);
    std::shared_ptr<Fabric> fabric;
    HostGroup::Members members{setup.local, {}, 0, setup.generation, setup.run, setup.options};
    const bool spans_hosts = setup.link && *std::max_element(setup.host_of.begin(), setup.host_of.end()) > 0;
    if (spans_hosts) {
        fabric = std::make_shared<Fabric>(
            setup.link, setup.host_of, setup.addresses, setup.index,
            Fabric::generation_identity(*setup.link, setup.generation, setup.ranks.size()), setup.options);
        for (int member : fabric->members(fabric->host()))
            members.ranks.push_back(setup.ranks[static_cast<std::size_t>(member)]);
        members.index = fabric->local_index(setup.index);
        opening.tell_by(fabric);
    } else {
        members.ranks = setup.ranks;
        members.index = setup.index;
    }
    const std::string first = "rank " + std::to_string(members.ranks.front());
    const int leader = setup.local.front();
    RankSlot& slot = ring_memory.slot(leader);
    std::unique_ptr<BlockReservation> reservation;
    if (members.index == 0) {
        try {
            reservation = std::make_unique<BlockReservation>(
                setup.ring_memory, setup.local, room_of(setup.options, ring_memory, fabric.get(), setup.ranks.size()));
        } catch (...) {
            HostGroup::publish(ring_memory, setup.local, kNowhere, setup.generation);
            throw;
        }
        HostGroup::publish(ring_memory, setup.local, reservation->offset(), setup.generation);
    } else {
        const std::int64_t deadline = deadline_after(timeout);
        wait_until(
            ring_memory.slot(ring_memory.local_rank()).bell, SpinPolicy{},
            [&] { return slot.generation.load(std::memory_order_seq_cst) >= setup.generation; },
            [&] {
                if (check) check();
                if (ring_memory.dead(leader))
                    throw Aborted(who + " waits for " + first + " to open the generation, but " + first + " has died");
                if (ring_memory.has_left_run(leader, setup.run))
                    throw Aborted(first + " finished its cell and will not open the generation that " + who +
                                  " waits for");
                if (is_past(deadline))
                    throw Timeout(who + " waited " + seconds_text(timeout) + " for " + first +
                                  " to open the generation");
            });
    }
    const std::uint64_t block = slot.generation_block.load(std::memory_order_seq_cst);
    if (slot.generation.load(std::memory_order_seq_cst) != setup.generation || block == kClosed)
        throw Aborted(who + " is too late for a generation that " + first + " has already left");
    if (block == kNowhere)
        throw Aborted(who + " failed to join the generation: " + first + " has no memory for the group");
    Generation generation;
    generation.group =
        std::make_shared<HostGroup>(setup.ring_memory, block, std::move(members), std::move(reservation));
    generation.fabric = fabric;
    generation.recorder = std::make_shared<Recorder>(std::move(setup.log));
    generation.standstill =
        std::make_shared<StandstillWatch>(generation.group, fabric, generation.recorder, setup.options.standstill);
    generation.number = setup.generation;
    generation.progress = std::make_shared<Progress>(generation.group->bell(), generation.group->spin());
    if (setup.devices) generation.devices = std::make_shared<DeviceStream>(std::move(setup.devices));
    auto group = generation.group;
    std::shared_ptr<Communicator> self(new Communicator(std::move(setup.ranks), setup.index, std::move(group),
                                                        std::move(fabric), std::move(generation)));
    Request meet;
    meet.kind = OpKind::Allreduce;
    meet.dtype = DType::Int64;
    meet.op = ReduceOp::Max;
    meet.shape = {1};
    self->disruptions_ = setup.disruptions;
    auto* const disruptions = reinterpret_cast<std::byte*>(&self->disruptions_);
    meet.pieces = {{disruptions, disruptions, 1}};
    meet.name = "begin";
    // Between hosts, as with a commit: a rank that has all headers may abort while messages to others are under way.
    const std::shared_ptr<Work> work = self->make_work(std::move(meet), timeout);
    if (self->fabric_) work->patience = kCommitPatience;
    self->run(work, check);
    work->get();
    opening.joined();
    return self;
}

// The members (indices in this group) on this host. The index is -1 where this rank is not a member.
HostGroup::Members Communicator::members_here(const std::vector<int>& indices) const {
    HostGroup::Members members{{}, {}, -1, 0, 0, group_->options()};
    for (int member : indices) {
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        if (member == index()) members.index = static_cast<int>(members.local.size());
        members.local.push_back(group_->local_rank(fabric_ ? fabric_->local_index(member) : member));
        members.ranks.push_back(ranks()[static_cast<std::size_t>(member)]);
    }
    return members;
}

namespace {

std::uint64_t next_of_this_process() {
    static std::atomic<std::uint64_t> made{0};
    return made.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

MemberGroup::MemberGroup(std::shared_ptr<Communicator> parent, std::vector<int> members)
    : parent_(std::move(parent)), members_(std::move(members)) {
    Request request;
    request.kind = OpKind::Allgather;  // of the cards
    request.name = "group";
    if (std::find(members_.begin(), members_.end(), parent_->index()) == members_.end())
        throw parent_->invalid(request, "only its members make it, and this rank is not a member");
    parent_->validate(request);
    if (parent_->fabric_ && parent_->fabric_->spans(members_)) {
        number_ = std::make_shared<TagNumber>(parent_->fabric_->shared_link());
        const auto first = static_cast<std::uint64_t>(members_.front());
        id_ = parent_->fabric_->part_id(first << 40 | next_of_this_process());
    }
    const HostGroup::Members here = parent_->members_here(members_);
    if (here.index != 0) return;  // the first of them on each host reserves the block
    const auto fabric = parent_->fabric_ ? parent_->fabric_->part(members_, {}) : nullptr;
    reservation_ = std::make_unique<BlockReservation>(
        parent_->ring_memory(), here.local,
        room_of(parent_->group_->options(), *parent_->ring_memory(), fabric.get(), members_.size()));
}

MemberCard MemberGroup::card() const {
    return {reservation_ ? reservation_->offset() : kNowhere, id_, number_ ? number_->value() : -1};
}

std::shared_ptr<Communicator> MemberGroup::enter(const std::vector<MemberCard>& cards) {
    if (cards.size() != members_.size())
        throw InvalidArgument(parent_->who() + ": a group of " + std::to_string(members_.size()) + " members, and " +
                              std::to_string(cards.size()) + " cards were given");
    const auto first = std::find_if(members_.begin(), members_.end(), [&](int member) {
        return !parent_->fabric_ || parent_->fabric_->host_of(member) == parent_->fabric_->host();
    });
    const std::uint64_t block = cards[static_cast<std::size_t>(first - members_.begin())].block;
    if (block == kNowhere) throw Aborted("the first member of the group on this host has no memory for it");
    auto group = std::make_shared<HostGroup>(parent_->ring_memory(), block, parent_->members_here(members_),
                                             std::move(reservation_), parent_->generation_.group);
    std::shared_ptr<Fabric> fabric;
    if (number_) {
        std::vector<int> numbers;
        for (const MemberCard& card : cards) numbers.push_back(card.number);
        fabric = parent_->fabric_->part(members_, {cards.front().id, std::move(numbers), std::move(number_)});
    }
    const auto own = std::find(members_.begin(), members_.end(), parent_->index()) - members_.begin();
    return std::shared_ptr<Communicator>(new Communicator(parent_->ranks_of(members_), static_cast<int>(own),
                                                          std::move(group), std::move(fabric), parent_->generation_));
}

}  // namespace ring
