// The ranks of one host that work together, and the block of ring memory in which they meet.
//
// Ranks pass a gate together again and again; a gate is the only synchronisation there is. Everything an operation
// does lies between two gates, so "a rank has arrived at gate k" says that it has finished what came before k.
//
//   post header, arrive | gate | step 0, arrive | gate | step 1, arrive | ...
//
// The last rank to arrive releases the gate and wakes the sleepers, so a sleeping rank wakes once per gate however many
// ranks there are.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ring/base/errors.hpp"
#include "ring/base/options.hpp"
#include "ring/base/wait.hpp"
#include "ring/group/block.hpp"
#include "ring/group/header.hpp"
#include "ring/group/tickets.hpp"
#include "ring/memory/memory.hpp"
#include "ring/memory/staging.hpp"

namespace ring {

// A payload up to Options::inline_bytes travels in the mailbox and needs one gate. Between hosts it travels to h-1
// others with the header, where a ring would send it 2(h-1)/h times after a round trip for the headers. With two hosts
// that costs the link nothing.
constexpr std::size_t kInlineBytesBetweenHosts = 64 << 10;
std::size_t inline_bytes(const Options& options, int hosts);

// A staged operation moves this much per rank and gate, so that segments stay in the cache that ranks share.
constexpr std::size_t kSegmentBytes = 256 << 10;
// Where ranks outnumber cores, each gate costs context switches, so fewer gates are worth more cache.
constexpr std::size_t kSegmentBytesCrowded = 512 << 10;
// One of these sizes, or what the options set; benchmarks/thresholds.py measures which are best.
std::size_t segment_bytes(const Options& options, const RingMemory& ring_memory);

struct RankActivity {
    int rank = 0;  // global
    RankState state = RankState::Idle;
    Header header;
    double seconds = 0.0;
    std::uint64_t arrivals = 0;
};

// Called every 50 ms while a rank waits; throws to end the wait (a signal, say).
using Interruption = std::function<void()>;

class HostGroup {
   public:
    // `local` are local ranks of the ring memory, `ranks` their numbers in the whole job, for messages.
    struct Members {
        std::vector<int> local;
        std::vector<int> ranks;
        int index = 0;                 // of this process
        std::uint64_t generation = 0;  // number of the generation that these members begin; 0 for a group in one
        std::uint64_t run = 0;         // that the generation belongs to; 0 for none
        Options options = {};          // of the generation
    };

    // Writes the offset of a generation's block to this rank's slot, for the other members; `kNowhere` for none.
    static void publish(RingMemory& ring_memory, const std::vector<int>& local, std::uint64_t block,
                        std::uint64_t generation);
    // Takes a reference to the block; throws Aborted where it is too late for that. The member that has reserved the
    // block hands the reservation over. `generation` is the group whose abort and departures count for this one too;
    // null for a generation's own group. `lane_of` is the group whose lane this is, if it is one.
    HostGroup(std::shared_ptr<RingMemory> ring_memory, std::uint64_t block, Members members,
              std::unique_ptr<BlockReservation> reservation, std::shared_ptr<HostGroup> generation = nullptr,
              const HostGroup* lane_of = nullptr);
    ~HostGroup();
    HostGroup(const HostGroup&) = delete;
    HostGroup& operator=(const HostGroup&) = delete;

    int size() const { return static_cast<int>(members_.local.size()); }
    int index() const { return members_.index; }
    const Options& options() const { return members_.options; }
    std::size_t inline_bytes() const { return room().inline_bytes; }
    std::size_t segment_bytes() const { return room().segment_bytes; }
    int rank() const { return members_.ranks[static_cast<std::size_t>(members_.index)]; }
    const std::vector<int>& ranks() const { return members_.ranks; }
    int local_rank(int member) const { return members_.local[static_cast<std::size_t>(member)]; }
    RingMemory& ring_memory() const { return *ring_memory_; }
    const std::shared_ptr<RingMemory>& shared_ring_memory() const { return ring_memory_; }
    Doorbell& bell() const { return ring_memory_->slot(ring_memory_->local_rank()).bell; }
    const SpinPolicy& spin() const { return spin_; }

    // --- the gate ---
    void post(const Header& header);
    // Arrives; returns the number of the gate to wait for. `device_sequence` is that of an operation that may be on
    // devices, else 0: the rank that releases the gate takes a ticket for it.
    std::uint64_t arrive(std::uint64_t device_sequence = 0);
    Tickets& tickets() { return tickets_; }
    // Operations that this rank has posted, and gates that it has come to, so far.
    std::uint64_t operations() const;
    std::uint64_t gates() const { return mailbox(index()).arrivals.load(std::memory_order_relaxed); }
    bool released(std::uint64_t gate) const { return block_->released.load(std::memory_order_seq_cst) >= gate; }
    // Global rank of the member of this host that came last to the gate that has been released.
    int last_to_come() const {
        const std::int32_t last = block_->last.load(std::memory_order_relaxed);
        return last < 0 ? -1 : members_.ranks[static_cast<std::size_t>(last)];
    }
    // Whether all members have arrived at the gate, which can be seen before its release. What they wrote before can be
    // read.
    bool all_have_arrived(std::uint64_t gate) const noexcept;
    // The same after an abort. If false, each member that arrives later sees the abort.
    bool all_have_come(std::uint64_t gate) const noexcept {
        block_->arrived.fetch_add(0, std::memory_order_seq_cst);
        return all_have_arrived(gate);
    }
    // Whether the first lines of all members' headers equal this rank's. Members may agree even if it is false.
    bool agrees_at_once(const Header& own) const;
    // Headers of all members for the operation whose gate has been released.
    std::vector<Header> headers(std::uint64_t sequence) const;
    // The header of one member that has arrived.
    Header header(int member, std::uint64_t sequence) const { return mailbox(member).headers[sequence % 2].load(); }
    // Whether a member waits at the next gate, to which this rank has yet to come.
    bool is_called() const {
        return block_->arrived.load(std::memory_order_seq_cst) > arrivals_ * static_cast<std::uint64_t>(size());
    }
    // Whether a member has come to the gate; what it has written before can be read.
    bool has_arrived(int member, std::uint64_t gate) const {
        return mailbox(member).arrivals.load(std::memory_order_seq_cst) >= gate;
    }
    // Wakes sleeping members for something other than a gate.
    void wake_all() const noexcept;
    // Whether waiting for `gate` is over for any reason.
    bool ready(std::uint64_t gate) const {
        return released(gate) || stops() ||
               generation_block_->departures.load(std::memory_order_seq_cst) != departures_seen_;
    }
    // Throws Aborted when the generation has ended or a member that has not arrived at `gate` has left or died.
    void check_alive(std::uint64_t gate, bool look_for_dead);
    // Throws Aborted when the generation has ended or a member has died that had not left.
    void check_members();

    // --- operations that complete on all members of this host or on none ---
    // These are commits, and on one host all operations that take one gate and read mailboxes only. A member that sees
    // that all have come completes it; if an abort has come too, it calls `decide` first. A member that cannot wait for
    // the others calls `rule_out`, behind an abort and after it has seen `all_have_come` false. So no member rules out
    // an operation that another completed without `decide`. The first call decides for all members. Both return whether
    // the operation completes. `rule_out` also ends all later ones.
    bool decide(std::uint64_t sequence) noexcept;
    bool rule_out(std::uint64_t sequence) noexcept;
    // This rank carries out operation `sequence`, and continues it for `ns` after an abort: 0 unless it is a commit
    // between hosts. A member that gives an operation up ends it and all later ones for the others. Earlier operations
    // continue: that member has completed them, so the others can too.
    void be_patient(std::int64_t ns, std::uint64_t sequence) noexcept {
        patience_.store(ns, std::memory_order_relaxed);
        carried_.store(sequence, std::memory_order_relaxed);
    }
    // Whether the operation that this rank carries out has to end.
    bool stops() const noexcept { return aborted() && is_out_of_patience(); }

    // --- memory that belongs to member `rank` of the group ---
    std::byte* inline_slot(int member, std::uint64_t sequence) const;
    std::int64_t* splits(int member, std::uint64_t sequence) const;
    std::byte* segment(int member, std::uint64_t step) const;
    std::byte* extra() const { return reference_->at(layout_.extra); }
    Staging& staging() { return staging_; }

    // --- the named lane ---
    // Where its block lies; kNowhere, kClaimed or kClosed where there is none.
    std::uint64_t lane() const { return block_->lane.load(std::memory_order_seq_cst); }
    // True for the one member that has to reserve the block.
    bool claim_lane() {
        std::uint64_t nowhere = kNowhere;
        return block_->lane.compare_exchange_strong(nowhere, kClaimed, std::memory_order_seq_cst);
    }
    // By the member that claimed it: from here on members may enter, until it is kClosed.
    void publish_lane(std::uint64_t block) const {
        block_->lane.store(block, std::memory_order_seq_cst);
        wake_all();
    }

    // --- the end of a generation ---
    bool aborted() const { return generation_block_->aborted.load(std::memory_order_seq_cst) != 0; }
    // The first of several reasons counts. `is_mismatch`: all operations raise a mismatch that no single one has found.
    void abort(std::string_view reason, bool is_mismatch = false) noexcept;
    // For a reason that came from another host, which the other hosts know already.
    void abort_by_other_host(std::string_view reason, bool is_mismatch) noexcept;
    bool aborted_by_mismatch() const {
        return aborted() && generation_block_->by_mismatch.load(std::memory_order_seq_cst) != 0;
    }
    // True once per abort on this host, for the rank that has to tell the other hosts.
    bool claim_announcement() noexcept {
        return generation_block_->announced.exchange(1, std::memory_order_acq_rel) == 0;
    }
    // Valid as long as the group.
    const char* abort_reason() const noexcept;
    // While a guard lives, other ranks' memory may be touched; none can be made once the operation has to end.
    class Moving {
       public:
        // One thread at a time carries out operations, and one messages: each has its own mark.
        explicit Moving(HostGroup& group, SharedAtomic<std::uint32_t> Mailbox::* mark = &Mailbox::busy);
        ~Moving();

       private:
        SharedAtomic<std::uint32_t>& mark_;
    };
    // The messages to a member, newest first.
    SharedAtomic<std::uint64_t>& envelopes(int member) const { return mailbox(member).envelopes; }
    void ring_bell_of(int member) const { ring_memory_->slot(local_rank(member)).bell.ring(); }
    // After an abort: waits until no other member touches this rank's memory, which none then does again. False if one
    // still does after 5 s, because it is stopped.
    bool wait_quiet() const noexcept;
    // Holds when no other member touches this rank's memory.
    std::shared_ptr<Arena::Condition> quiet() const { return reference_; }
    // This rank takes part in nothing more. True for the last rank of this host that leaves.
    bool leave() noexcept;
    // Whether the member with that local rank has left this group or its generation.
    bool has_left(int local) const;
    bool left() const { return left_.load(std::memory_order_acquire); }

    // Shows what this rank waits for, while it can do nothing else. For a generation's group.
    void show_standstill(const Standstill& one) { mailbox(index()).standstill.store(one); }
    // Adds the members of this host that have not left. False if one of them has shown no standstill since `since`.
    bool all_stand_still(StandingRanks& ranks, std::int64_t since) const;
    void set_state(RankState state, std::int64_t now = monotonic_ns());
    std::vector<RankActivity> activity() const;
    // "ranks 1, 3 have not called it": those that have not arrived at `gate`, and which of them are stopped.
    std::string missing(std::uint64_t gate) const;

   private:
    bool is_out_of_patience() const noexcept;
    Mailbox& mailbox(int member) const { return reference_->mailbox(member); }
    const Room& room() const { return room_; }

    std::shared_ptr<RingMemory> ring_memory_;
    Members members_;
    std::shared_ptr<HostGroup> generation_;
    std::unique_ptr<BlockReservation> reservation_;  // of the first member
    std::shared_ptr<BlockReference> reference_;
    GroupBlock* block_;
    const Room room_;  // a copy, because others can write to the block
    GroupBlock* generation_block_;
    Tickets tickets_;
    BlockLayout layout_;
    const SpinPolicy spin_;
    std::uint64_t arrivals_ = 0;
    std::uint32_t departures_seen_ = 0;
    std::atomic<std::int64_t> patience_{0};            // ns
    std::atomic<std::uint64_t> carried_{0};            // sequence of what this rank carries out
    mutable std::atomic<std::int64_t> aborted_at_{0};  // when this rank first saw the abort, while it was patient
    std::atomic<bool> left_{false};
    Staging staging_;
};

}  // namespace ring
