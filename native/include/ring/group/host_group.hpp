// The ranks of one host that work together, and the block of ring memory in which they meet.
//
// Ranks pass a gate together again and again; a gate is the only synchronisation there is. Everything an operation
// does lies between two gates, so "a rank has arrived at gate k" says that it has finished what came before k.
//
//   post header, arrive | gate | step 0, arrive | gate | step 1, arrive | ...
//
// Whoever arrives last releases the gate and wakes the sleepers, so a sleeping rank wakes once per gate however many
// ranks there are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"
#include "ring/group/header.hpp"
#include "ring/memory/memory.hpp"
#include "ring/memory/staging.hpp"

namespace ring {

enum class RankState : std::uint32_t { Idle = 0, Waiting = 1, Moving = 2, Left = 3 };
const char* to_string(RankState state);

constexpr std::size_t kReasonBytes = 4096;
// A payload up to this size travels in the mailbox and needs one gate.
constexpr std::size_t kInlineBytes = 16 << 10;
// Between hosts it travels to h-1 others with the header, where a ring would send it 2(h-1)/h times after a round trip
// for the headers. With two hosts that costs the link nothing.
constexpr std::size_t kInlineBytesBetweenHosts = 64 << 10;
std::size_t inline_bytes(int hosts);

// A staged operation moves this much per rank and gate, so that segments stay in the cache that ranks share. Three
// slots, because one is filled while the one before is reduced and the one before that is copied out.
constexpr std::size_t kSegmentBytes = 256 << 10;
constexpr std::size_t kSegmentSlots = 3;
// Where ranks outnumber cores a gate takes switches of context: fewer of them are worth some of the cache.
constexpr std::size_t kSegmentBytesCrowded = 512 << 10;
// These sizes, or what RING_INLINE and RING_SEGMENT set in their place; benchmarks/thresholds.py measures which are
// best.
std::size_t segment_bytes(const Domain& domain);

// What the block of a group has room for. The member that reserves it decides for all.
struct Room {
    std::size_t ranks = 0;          // members on all hosts
    std::size_t inline_bytes = 0;   // of a payload that travels in the mailbox
    std::size_t segment_bytes = 0;  // of a segment
    std::size_t extra = 0;          // bytes that the group's hosts share
};

// Whether a member uses the block of its group. The block is free when all members are Gone or dead.
enum class Presence : std::uint32_t { Expected = 0, Here = 1, Gone = 2 };

struct alignas(128) Mailbox {
    std::atomic<std::uint64_t> arrivals{0};
    std::atomic<std::uint32_t> busy{0};  // is touching other ranks' memory
    std::atomic<RankState> state{RankState::Idle};
    std::atomic<std::int64_t> since{0};
    std::atomic<std::uint32_t> left{0};
    std::atomic<Presence> presence{Presence::Expected};
    alignas(64) SharedCopy<Header> headers[2];
};

struct GroupBlock {
    std::int32_t size = 0;
    std::atomic<std::uint64_t> epoch{0};  // that it is the block of; 0 for that of a group in one
    Room room;
    std::atomic<std::int32_t> left{0};
    alignas(64) std::atomic<std::uint64_t> arrived{0};
    std::atomic<std::int32_t> last{-1};  // index of the member that released the gate
    alignas(64) std::atomic<std::uint64_t> released{0};
    // Only the block of an epoch uses these; its groups share them.
    alignas(64) std::atomic<std::uint32_t> aborted{0};  // 1: someone writes the reason, 2: it can be read
    std::atomic<std::uint32_t> announced{0};            // whether the other hosts know of the abort
    std::atomic<std::uint32_t> departures{0};
    char reason[kReasonBytes];
};

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
    // `local` are local ranks of the domain, `ranks` their numbers in the whole job, for messages.
    struct Members {
        std::vector<int> local;
        std::vector<int> ranks;
        int index = 0;            // of this process
        std::uint64_t epoch = 0;  // number of the epoch that these members begin; 0 for a group in one
        std::uint64_t run = 0;    // that the epoch belongs to; 0 for none
    };

    // Reserves a block for a group of these local ranks in this rank's arena. It is freed when every member has come
    // and gone, or has died, or will never come.
    static std::uint64_t reserve(const std::shared_ptr<Domain>& domain, const std::vector<int>& local, const Room& room,
                                 std::uint64_t epoch = 0);
    // Whoever has not come to a reserved block by now will not be let in.
    static void bar(Domain& domain, std::uint64_t block);
    // `epoch` is the group whose abort and departures count for this one too; null for an epoch's own group.
    HostGroup(std::shared_ptr<Domain> domain, std::uint64_t block, Members members,
              std::shared_ptr<HostGroup> epoch = nullptr);
    ~HostGroup();
    HostGroup(const HostGroup&) = delete;
    HostGroup& operator=(const HostGroup&) = delete;

    int size() const { return static_cast<int>(members_.local.size()); }
    int index() const { return members_.index; }
    std::size_t inline_bytes() const { return block_->room.inline_bytes; }
    std::size_t segment_bytes() const { return block_->room.segment_bytes; }
    int rank() const { return members_.ranks[static_cast<std::size_t>(members_.index)]; }
    const std::vector<int>& ranks() const { return members_.ranks; }
    int local_rank(int member) const { return members_.local[static_cast<std::size_t>(member)]; }
    Domain& domain() const { return *domain_; }
    const std::shared_ptr<Domain>& shared_domain() const { return domain_; }
    Bell& bell() const { return domain_->slot(domain_->local_rank()).bell; }
    const SpinPolicy& spin() const { return spin_; }
    void set_spin(const SpinPolicy& spin) { spin_ = spin; }

    // --- the gate ---
    void post(const Header& header);
    // Arrives; returns the number of the gate to wait for.
    std::uint64_t arrive();
    bool released(std::uint64_t gate) const { return block_->released.load(std::memory_order_seq_cst) >= gate; }
    // Global rank of the member of this host that came last to the gate that has been released.
    int last_to_come() const {
        const std::int32_t last = block_->last.load(std::memory_order_relaxed);
        return last < 0 ? -1 : members_.ranks[static_cast<std::size_t>(last)];
    }
    // Headers of all members for the operation whose gate has been released.
    std::vector<Header> headers(std::uint64_t sequence) const;
    // Whether waiting for `gate` is over for any reason.
    bool ready(std::uint64_t gate) const {
        return released(gate) || aborted() ||
               epoch_block_->departures.load(std::memory_order_seq_cst) != departures_seen_;
    }
    // Throws Aborted when the epoch has ended or a member that has not arrived at `gate` has left or died.
    void check_alive(std::uint64_t gate, bool look_for_dead);

    // --- memory that belongs to member `rank` of the group ---
    std::byte* inline_slot(int member, std::uint64_t sequence) const;
    std::int64_t* splits(int member, std::uint64_t sequence) const;
    std::byte* segment(int member, std::uint64_t step) const;
    std::byte* extra() const;
    Staging& staging() { return staging_; }

    // --- the end of an epoch ---
    bool aborted() const { return epoch_block_->aborted.load(std::memory_order_seq_cst) != 0; }
    void abort(const std::string& reason);
    // The same for a reason that came from another host.
    void abort_from_afar(const std::string& reason);
    // True once per abort on this host, for the rank that has to tell the other hosts.
    bool take_announcement() { return epoch_block_->announced.exchange(1, std::memory_order_acq_rel) == 0; }
    std::string abort_reason() const;
    // While a guard lives, other ranks' memory may be touched; none can be made once the epoch has been aborted.
    class Moving {
       public:
        explicit Moving(HostGroup& group);
        ~Moving();

       private:
        HostGroup& group_;
    };
    // Whether no other member touches this rank's memory; after an abort none will again.
    bool quiet() const;
    // After an abort: returns when it is quiet, or false when it is not after a time that only a stopped process needs.
    bool wait_quiet() const;
    // This rank will take part in nothing more. True for the last rank of this host that leaves.
    bool leave();
    // Whether the member with that local rank has left this group or its epoch.
    bool has_left(int local) const;
    bool left() const { return left_; }

    void set_state(RankState state);
    std::vector<RankActivity> activity() const;
    // "ranks 1, 3": who has not arrived at `gate`.
    std::string missing(std::uint64_t gate) const;

   private:
    Mailbox& mailbox(int member) const;
    void wake_all() const;

    std::shared_ptr<Domain> domain_;
    std::uint64_t offset_;
    Members members_;
    std::shared_ptr<HostGroup> epoch_;
    GroupBlock* block_;
    GroupBlock* epoch_block_;
    SpinPolicy spin_;
    std::uint64_t arrivals_ = 0;
    std::uint32_t departures_seen_ = 0;
    bool left_ = false;
    Staging staging_;
};

}  // namespace ring
