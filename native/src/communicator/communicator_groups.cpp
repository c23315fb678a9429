// How communicators come to be: epochs, and groups within them.
#include <algorithm>
#include <functional>
#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {

namespace {

// Tells whoever waits for this rank in an epoch that it will not come, unless it does.
class Coming {
   public:
    Coming(RankSlot& own, std::uint64_t epoch) : own_(own), epoch_(epoch) {}
    ~Coming() {
        if (came_) return;
        own_.given_up.store(std::max(own_.given_up.load(), epoch_), std::memory_order_seq_cst);
        if (fabric_) fabric_->announce_abort("a rank of another host was stopped before it came");
    }
    void through(std::shared_ptr<Fabric> fabric) { fabric_ = std::move(fabric); }
    void came() { came_ = true; }

   private:
    RankSlot& own_;
    std::uint64_t epoch_;
    std::shared_ptr<Fabric> fabric_;
    bool came_ = false;
};

// `fabric` is null where all `ranks` members share a host.
Room room_of(const Domain& domain, const Fabric* fabric, std::size_t ranks) {
    return {ranks, inline_bytes(fabric ? fabric->hosts() : 1), segment_bytes(domain),
            fabric ? extra_bytes(*fabric) : 0};
}

}  // namespace

std::shared_ptr<Communicator> Communicator::open(Setup setup, double timeout, const Interruption& check) {
    Domain& domain = *setup.domain;
    Coming coming(domain.slot(domain.local_rank()), setup.epoch);
    const std::string who = "rank " + std::to_string(setup.ranks[static_cast<std::size_t>(setup.index)]);
    std::shared_ptr<Fabric> fabric;
    HostGroup::Members members{setup.local, {}, 0, setup.epoch, setup.run};
    const bool spans_hosts = setup.link && *std::max_element(setup.host_of.begin(), setup.host_of.end()) > 0;
    if (spans_hosts) {
        fabric = std::make_shared<Fabric>(setup.link, setup.host_of, setup.addresses, setup.index,
                                          Fabric::epoch_identity(*setup.link, setup.epoch, setup.ranks.size()));
        for (int member : fabric->members(fabric->host()))
            members.ranks.push_back(setup.ranks[static_cast<std::size_t>(member)]);
        members.index = fabric->local_index(setup.index);
        coming.through(fabric);
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
            publish(HostGroup::reserve(setup.domain, setup.local, room_of(domain, fabric.get(), setup.ranks.size()),
                                       setup.epoch));
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
                if (domain.has_left_run(leader, setup.run))
                    throw Aborted(who + " waits to begin and " + first + " has ended its cell");
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
    epoch.recorder = std::make_shared<Recorder>();
    epoch.progress = std::make_shared<Progress>(epoch.group->bell(), epoch.group->spin());
    auto group = epoch.group;
    std::shared_ptr<Communicator> self(
        new Communicator(std::move(setup.ranks), setup.index, std::move(group), std::move(fabric), std::move(epoch)));
    Request meet;
    meet.name = "begin";
    self->run(std::move(meet), timeout, check)->get();
    coming.came();
    return self;
}

// Those of the members (indices in this group) who are on this host. The index is -1 where this rank is not among them.
HostGroup::Members Communicator::members_here(const std::vector<int>& indices) const {
    HostGroup::Members members{{}, {}, -1, 0, 0};
    for (int member : indices) {
        if (fabric_ && fabric_->host_of(member) != fabric_->host()) continue;
        if (member == index()) members.index = static_cast<int>(members.local.size());
        members.local.push_back(group_->local_rank(fabric_ ? fabric_->local_index(member) : member));
        members.ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
    }
    return members;
}

// The first of the new group's members on each host reserves the block for them.
std::uint64_t Communicator::reserve_part(const std::vector<int>& indices) const {
    const HostGroup::Members members = members_here(indices);
    if (members.index != 0) return kNowhere;
    const auto fabric = fabric_ ? fabric_->part(indices, {}) : nullptr;
    return HostGroup::reserve(domain(), members.local, room_of(*domain(), fabric.get(), indices.size()));
}

std::unique_ptr<Algorithm> Communicator::make_group(Work& work, const std::vector<Header>& headers) const {
    // Members come to the block before anyone returns, so that a group either is there for all or for none.
    class Come : public GatedAlgorithm {
       public:
        explicit Come(std::function<void()> come) : come_(std::move(come)) {}

       protected:
        bool step(std::uint64_t k) override {
            if (k == 0 && come_) come_();
            return k == 1;
        }

       private:
        std::function<void()> come_;
    };

    const std::vector<int>& indices = work.request_.members;
    HostGroup::Members members = members_here(indices);
    if (members.index < 0) return std::make_unique<Come>(nullptr);
    const auto first = std::find_if(indices.begin(), indices.end(), [&](int member) {
        return !fabric_ || fabric_->host_of(member) == fabric_->host();
    });
    const std::uint64_t block = headers[static_cast<std::size_t>(*first)].input;
    if (work.number_)
        for (int member : indices)
            work.numbers_.push_back(static_cast<int>(headers[static_cast<std::size_t>(member)].output));
    return std::make_unique<Come>([this, &work, block, members = std::move(members)] {
        work.result_.group = std::make_shared<HostGroup>(domain(), block, members, epoch_.group);
    });
}

std::shared_ptr<Communicator> Communicator::subgroup(Work& work) const {
    if (!work.result_.group) return nullptr;
    const std::vector<int>& indices = work.request_.members;
    std::vector<int> ranks;
    for (int member : indices) ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
    const auto own = std::find(indices.begin(), indices.end(), index()) - indices.begin();
    std::shared_ptr<Fabric> fabric;
    // All members count operations alike, so the id is the same on each of them.
    if (fabric_)
        fabric = fabric_->part(
            indices, {fabric_->part_id(work.header_.sequence), std::move(work.numbers_), std::move(work.number_)});
    return std::shared_ptr<Communicator>(new Communicator(std::move(ranks), static_cast<int>(own),
                                                          std::move(work.result_.group), std::move(fabric), epoch_));
}

}  // namespace ring
