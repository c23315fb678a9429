#include "ring/group/host_group.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "ring/base/text.hpp"

namespace ring {
namespace {

constexpr double kLongestSpin = 1e9;            // µs; as good as for ever
constexpr std::int64_t kQuiet = 5'000'000'000;  // ns

bool crowded(const RingMemory& ring_memory) { return ring_memory.local_size() > ring_memory.cores(); }

SpinPolicy spin_policy(const Options& options, RingMemory& ring_memory) {
    ring_memory.publish_cores();  // they may have changed since the last generation
    SpinPolicy policy;
    if (crowded(ring_memory)) {
        policy.yield = true;
        policy.budget = std::chrono::microseconds(20);
    }
    if (options.spin >= 0.0)
        policy.budget = std::chrono::nanoseconds(static_cast<long long>(std::min(kLongestSpin, options.spin) * 1e3));
    return policy;
}

}  // namespace

std::size_t inline_bytes(const Options& options, int hosts) {
    const std::size_t most = round_up(options.inline_bytes, kPage);
    if (hosts == 1) return most;
    // Whole cache lines, so that every slot begins where each dtype may.
    return std::max(most, kInlineBytesBetweenHosts / static_cast<std::size_t>(hosts - 1) / kHeaderLine * kHeaderLine);
}

std::size_t segment_bytes(const Options& options, const RingMemory& ring_memory) {
    if (options.segment_bytes > 0) return round_up(options.segment_bytes, kPage);
    return crowded(ring_memory) ? kSegmentBytesCrowded : kSegmentBytes;
}

void HostGroup::publish(RingMemory& ring_memory, const std::vector<int>& local, std::uint64_t block,
                        std::uint64_t generation) {
    RankSlot& slot = ring_memory.slot(ring_memory.local_rank());
    slot.generation.store(0, std::memory_order_seq_cst);  // no rank takes it for the previous generation's block
    slot.generation_block.store(block, std::memory_order_seq_cst);
    slot.generation.store(generation, std::memory_order_seq_cst);
    for (int member : local) ring_memory.slot(member).bell.ring();
}

HostGroup::HostGroup(std::shared_ptr<RingMemory> ring_memory, std::uint64_t block, Members members,
                     std::unique_ptr<BlockReservation> reservation, std::shared_ptr<HostGroup> generation,
                     const HostGroup* lane_of)
    : ring_memory_(std::move(ring_memory)),
      members_(std::move(members)),
      generation_(std::move(generation)),
      reservation_(std::move(reservation)),
      reference_(std::make_shared<BlockReference>(
          *ring_memory_, block, members_.local, members_.index,
          [this, block, lane_of] {
              if (lane_of != nullptr) return lane_of->lane() == block;
              // Members of a group come to its block within an operation of the generation,
              // and to none once that has ended.
              if (generation_) return !generation_->aborted();
              const RankSlot& leader = ring_memory_->slot(members_.local.front());
              return leader.generation_block.load(std::memory_order_seq_cst) == block &&
                     leader.generation.load(std::memory_order_seq_cst) == members_.generation;
          })),
      block_(&reference_->block()),
      room_(block_->room),
      generation_block_(generation_ ? generation_->block_ : block_),
      tickets_(*block_, *generation_block_),
      layout_(size(), room()),
      spin_(spin_policy(options(), *ring_memory_)),
      staging_(options().staging) {}

HostGroup::~HostGroup() {
    if (ring_memory_->owned()) leave();
}

std::byte* HostGroup::inline_slot(int member, std::uint64_t sequence) const {
    const auto slot = static_cast<std::size_t>(member) * 2 + sequence % 2;
    return reference_->at(layout_.slots + slot * inline_bytes());
}

std::int64_t* HostGroup::splits(int member, std::uint64_t sequence) const {
    const auto slot = static_cast<std::size_t>(member) * 2 + sequence % 2;
    return reinterpret_cast<std::int64_t*>(reference_->at(layout_.splits + slot * room().ranks * sizeof(std::int64_t)));
}

std::byte* HostGroup::segment(int member, std::uint64_t step) const {
    const auto slot = static_cast<std::size_t>(member) * kSegmentSlots + step % kSegmentSlots;
    return reference_->at(layout_.segments + slot * segment_bytes());
}
void HostGroup::post(const Header& header) { mailbox(index()).headers[header.sequence % 2].store(header); }

std::uint64_t HostGroup::arrive(std::uint64_t device_sequence) {
    const std::uint64_t gate = ++arrivals_;
    mailbox(index()).arrivals.store(gate, std::memory_order_release);
    // In one order with the bells: a rank that fell asleep before it saw this arrival is woken.
    const std::uint64_t all = block_->arrived.fetch_add(1, std::memory_order_seq_cst) + 1;
    // Greater when another rank has seen this arrival and come to the next gate since.
    if (all >= gate * static_cast<std::uint64_t>(size())) {
        block_->last.store(index(), std::memory_order_relaxed);
        if (device_sequence != 0) {
            const std::vector<Header> posted = headers(device_sequence);
            if (std::any_of(posted.begin(), posted.end(),
                            [](const Header& one) { return !in_host_memory(one.device); }))
                tickets_.take();
        }
        block_->released.store(gate, std::memory_order_seq_cst);
        wake_all();
    }
    return gate;
}

std::uint64_t HostGroup::operations() const {
    const Mailbox& own = mailbox(index());
    return std::max(own.headers[0].load().sequence, own.headers[1].load().sequence);
}

bool HostGroup::all_have_arrived(std::uint64_t gate) const noexcept {
    for (int i = 0; i < size(); ++i)
        if (mailbox(i).arrivals.load(std::memory_order_seq_cst) < gate) return false;
    return true;
}

bool HostGroup::agrees_at_once(const Header& own) const {
    for (int i = 0; i < size(); ++i)
        if (!mailbox(i).headers[own.sequence % 2].begins_like(own, kHeaderLine / sizeof(std::uint64_t))) return false;
    return true;
}

std::vector<Header> HostGroup::headers(std::uint64_t sequence) const {
    std::vector<Header> all(static_cast<std::size_t>(size()));
    for (int i = 0; i < size(); ++i) all[static_cast<std::size_t>(i)] = mailbox(i).headers[sequence % 2].load();
    return all;
}

void HostGroup::wake_all() const noexcept {
    for (int i = 0; i < size(); ++i) ring_memory_->slot(members_.local[static_cast<std::size_t>(i)]).bell.ring();
}

bool HostGroup::decide(std::uint64_t sequence) noexcept {
    std::uint64_t last = block_->decided.load(std::memory_order_seq_cst);
    while (last < sequence)  // which it is not once kRuledOut is set
        if (block_->decided.compare_exchange_weak(last, sequence, std::memory_order_seq_cst)) return true;
    return (last & ~kRuledOut) >= sequence;
}

bool HostGroup::rule_out(std::uint64_t sequence) noexcept {
    std::uint64_t last = block_->decided.load(std::memory_order_seq_cst);
    while (last < sequence)  // this member has completed what came before
        if (block_->decided.compare_exchange_weak(last, (sequence - 1) | kRuledOut, std::memory_order_seq_cst))
            return false;
    return (last & ~kRuledOut) >= sequence;
}

bool HostGroup::is_out_of_patience() const noexcept {
    const std::int64_t patience = patience_.load(std::memory_order_relaxed);
    if (patience == 0) return true;
    const std::uint64_t decided = block_->decided.load(std::memory_order_seq_cst);
    if ((decided & kRuledOut) != 0 && (decided & ~kRuledOut) < carried_.load(std::memory_order_relaxed)) return true;
    const std::int64_t now = monotonic_ns();
    std::int64_t since = 0;
    if (aborted_at_.compare_exchange_strong(since, now, std::memory_order_relaxed)) since = now;
    return now - since >= patience;
}

void HostGroup::check_alive(std::uint64_t gate, bool look_for_dead) {
    bool is_missing = false;
    if (stops()) throw Aborted(abort_reason());
    departures_seen_ = generation_block_->departures.load(std::memory_order_seq_cst);
    for (int i = 0; i < size() && !released(gate); ++i) {
        if (i == index()) continue;
        const int local = members_.local[static_cast<std::size_t>(i)];
        const RankSlot& slot = ring_memory_->slot(local);
        const bool was_stopped =
            members_.generation != 0 && slot.given_up.load(std::memory_order_seq_cst) >= members_.generation;
        const bool has_finished = members_.generation != 0 && ring_memory_->has_left_run(local, members_.run);
        const bool left = has_left(local);
        // After those: it may have arrived just before.
        const bool arrived = mailbox(i).arrivals.load(std::memory_order_seq_cst) >= gate;
        const auto blame = [&](const std::string& what) {
            if (released(gate)) return;
            is_missing = true;
            abort("rank " + std::to_string(members_.ranks[static_cast<std::size_t>(i)]) + what);
        };
        if (!arrived && left) {
            blame(" has left (its cell or script ended) while others wait for it");
        } else if (!arrived && was_stopped) {
            blame(" was stopped before it joined this generation");
        } else if (!arrived && has_finished) {
            blame(" finished its cell and will not join this generation");
        } else if (look_for_dead && ring_memory_->dead(local)) {
            // Also when it has arrived: it may have died before it could release the gate.
            blame(" (process " + std::to_string(slot.pid) + ") has died");
        }
    }
    if (is_missing || stops()) throw Aborted(abort_reason());
}

void HostGroup::check_members() {
    for (int i = 0; i < size() && !aborted(); ++i) {
        const int local = members_.local[static_cast<std::size_t>(i)];
        if (i == index() || has_left(local) || !ring_memory_->dead(local)) continue;
        abort("rank " + std::to_string(members_.ranks[static_cast<std::size_t>(i)]) + " (process " +
              std::to_string(ring_memory_->slot(local).pid) + ") has died");
    }
    if (aborted()) throw Aborted(abort_reason());
}

void HostGroup::abort(std::string_view reason, bool is_mismatch) noexcept {
    std::uint32_t expected = 0;
    if (generation_block_->aborted.compare_exchange_strong(expected, 1, std::memory_order_seq_cst)) {
        reason.copy(generation_block_->reason, kReasonBytes - 1);  // the block was zeroed
        generation_block_->by_mismatch.store(is_mismatch ? 1 : 0, std::memory_order_seq_cst);
        generation_block_->aborted.store(2, std::memory_order_seq_cst);
    }
    if (generation_) {
        generation_->wake_all();
    } else {
        wake_all();
    }
}

void HostGroup::abort_by_other_host(std::string_view reason, bool is_mismatch) noexcept {
    claim_announcement();
    abort(reason, is_mismatch);
}

const char* HostGroup::abort_reason() const noexcept {
    // The writer is a few instructions away from 2, unless it died there.
    for (int i = 0; i < 1000 && generation_block_->aborted.load(std::memory_order_acquire) == 1; ++i) cpu_yield();
    if (generation_block_->aborted.load(std::memory_order_acquire) != 2)
        return "another rank aborted and gave no reason";
    return generation_block_->reason;
}

HostGroup::Moving::Moving(HostGroup& group, SharedAtomic<std::uint32_t> Mailbox::* mark)
    : mark_(group.mailbox(group.index()).*mark) {
    // Pairs with abort() or rule_out(), and wait_quiet(): either the rank that gives up sees the mark, or this one sees
    // that it has given up.
    mark_.store(1, std::memory_order_seq_cst);
    if (mark == &Mailbox::busy ? group.stops() : group.aborted()) {
        mark_.store(0, std::memory_order_seq_cst);
        throw Aborted(group.abort_reason());
    }
}

HostGroup::Moving::~Moving() { mark_.store(0, std::memory_order_release); }

bool HostGroup::wait_quiet() const noexcept {
    // A rank with a Moving guard never waits for another and looks for aborts, so this ends as soon as the others get a
    // processor. But one that is stopped (SIGSTOP, a debugger) must not hold this rank here.
    const std::int64_t deadline = monotonic_ns() + kQuiet;
    while (!reference_->holds(*ring_memory_)) {
        if (monotonic_ns() > deadline) return false;
        cpu_yield();
    }
    return true;
}

bool HostGroup::leave() noexcept {
    if (!ring_memory_->owned() || left_.exchange(true)) return false;
    Mailbox& own = mailbox(index());
    own.state.store(RankState::Left, std::memory_order_relaxed);
    own.left.store(1, std::memory_order_seq_cst);
    const bool last = block_->left.fetch_add(1, std::memory_order_acq_rel) + 1 == size();
    generation_block_->departures.fetch_add(1, std::memory_order_seq_cst);
    wake_all();
    return last;
}

bool HostGroup::has_left(int local) const {
    const auto member = std::find(members_.local.begin(), members_.local.end(), local) - members_.local.begin();
    return mailbox(static_cast<int>(member)).left.load(std::memory_order_seq_cst) != 0 ||
           (generation_ && generation_->has_left(local));
}

bool HostGroup::all_stand_still(StandingRanks& ranks, std::int64_t since) const {
    for (int member = 0; member < size(); ++member) {
        const Mailbox& box = mailbox(member);
        if (box.left.load(std::memory_order_seq_cst) != 0) continue;
        const Standstill one = box.standstill.load();
        if (one.shown < since) return false;
        ranks.add(members_.ranks[static_cast<std::size_t>(member)], one);
    }
    return true;
}

void HostGroup::set_state(RankState state, std::int64_t now) {
    if (left()) return;
    Mailbox& own = mailbox(index());
    own.state.store(state, std::memory_order_relaxed);
    own.since.store(now, std::memory_order_relaxed);
}

std::vector<RankActivity> HostGroup::activity() const {
    std::vector<RankActivity> all;
    const std::int64_t now = monotonic_ns();
    for (int i = 0; i < size(); ++i) {
        const Mailbox& box = mailbox(i);
        RankActivity one;
        one.rank = members_.ranks[static_cast<std::size_t>(i)];
        one.state = box.state.load(std::memory_order_relaxed);
        const Header even = box.headers[0].load();
        const Header odd = box.headers[1].load();
        one.header = even.sequence > odd.sequence ? even : odd;
        one.header.name[kNameBytes - 1] = '\0';
        const std::int64_t since = box.since.load(std::memory_order_relaxed);
        one.seconds = since == 0 ? 0.0 : static_cast<double>(now - since) * 1e-9;
        one.arrivals = box.arrivals.load(std::memory_order_relaxed);
        all.push_back(one);
    }
    return all;
}

std::string HostGroup::missing(std::uint64_t gate) const {
    std::vector<int> ranks;
    std::string stopped;
    for (int i = 0; i < size(); ++i) {
        if (has_arrived(i, gate)) continue;
        ranks.push_back(members_.ranks[static_cast<std::size_t>(i)]);
        if (ring_memory_->stopped(local_rank(i)))
            stopped += "; a signal or a debugger has stopped rank " + std::to_string(ranks.back()) + " (process " +
                       std::to_string(ring_memory_->slot(local_rank(i)).pid) + ")";
    }
    return rank_list(ranks) + " not called it" + stopped;
}

}  // namespace ring
