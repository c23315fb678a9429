// How communicators come to be: epochs, and groups within them.
#include <algorithm>
#include <utility>

#include "agreement.hpp"
#include "ring/communicator.hpp"
#include "ring/progress.hpp"

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

}  // namespace

std::shared_ptr<Communicator> Communicator::open(Setup setup, double timeout, const Interruption& check) {
    Domain& domain = *setup.domain;
    Coming coming(domain.slot(domain.local_rank()), setup.epoch);
    const std::string who = "rank " + std::to_string(setup.ranks[static_cast<std::size_t>(setup.index)]);
    std::shared_ptr<Fabric> fabric;
    HostGroup::Members members{setup.local, {}, 0, setup.ranks.size(), setup.epoch};
    const bool spans_hosts = setup.link && *std::max_element(setup.host_of.begin(), setup.host_of.end()) > 0;
    if (spans_hosts) {
        // Tags have room for some bits; a number that comes again is long out of use by then.
        fabric = std::make_shared<Fabric>(setup.link, setup.host_of, setup.addresses, setup.index, setup.epoch << 12);
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

}  // namespace ring
