#include "ring/group/host_group.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace ring {
namespace {

constexpr double kLongestSpin = 1e9;            // µs; as good as for ever
constexpr std::int64_t kQuiet = 5'000'000'000;  // ns

// The block of a group of n ranks of this host:
//   | GroupBlock | Mailbox x n | inline slots 2 x n | splits 2 x n x all ranks | segments 3 x n | extra |
struct Layout {
    Layout(int size, const Room& room) {
        const auto n = static_cast<std::size_t>(size);
        mailboxes = align(sizeof(GroupBlock));
        slots = align(mailboxes + n * sizeof(Mailbox));
        splits = align(slots + 2 * n * room.inline_bytes);
        segments = align(splits + 2 * n * room.ranks * sizeof(std::int64_t));
        bytes = segments + kSegmentSlots * n * room.segment_bytes;
    }
    static std::size_t align(std::size_t value) { return (value + kPage - 1) / kPage * kPage; }
    std::size_t mailboxes, slots, splits, segments, bytes;
};

Mailbox& mailbox_at(const Domain& domain, std::uint64_t block, int member) {
    return *domain.at<Mailbox>(block + Layout(0, {}).mailboxes + static_cast<std::size_t>(member) * sizeof(Mailbox));
}

bool crowded(const Domain& domain) { return domain.local_size() > domain.cores(); }

// Bytes that a variable sets, in whole pages.
std::size_t bytes_set(const char* variable, std::size_t otherwise) {
    const char* text = std::getenv(variable);
    const long long bytes = text == nullptr ? 0 : std::atoll(text);
    return bytes <= 0 ? otherwise : Layout::align(static_cast<std::size_t>(bytes));
}

SpinPolicy default_spin(Domain& domain) {
    domain.publish_cores();  // they may have changed since the last epoch
    SpinPolicy policy;
    if (crowded(domain)) {
        policy.yield = true;
        policy.budget = std::chrono::microseconds(20);
    }
    if (const char* text = std::getenv("RING_SPIN"); text != nullptr && *text != '\0' && *text != '-')
        policy.budget = std::chrono::nanoseconds(static_cast<long long>(std::min(kLongestSpin, std::atof(text)) * 1e3));
    return policy;
}

}  // namespace

std::size_t inline_bytes(int hosts) {
    const std::size_t most = bytes_set("RING_INLINE", kInlineBytes);
    return hosts == 1 ? most : std::max(most, kInlineBytesBetweenHosts / static_cast<std::size_t>(hosts - 1));
}

std::size_t segment_bytes(const Domain& domain) {
    return bytes_set("RING_SEGMENT", crowded(domain) ? kSegmentBytesCrowded : kSegmentBytes);
}

const char* to_string(RankState state) {
    static constexpr const char* names[] = {"idle", "waiting", "moving", "left"};
    return names[static_cast<int>(state)];
}

std::uint64_t HostGroup::reserve(const std::shared_ptr<Domain>& domain, const std::vector<int>& local, const Room& room,
                                 std::uint64_t epoch) {
    const int size = static_cast<int>(local.size());
    const Layout layout(size, room);
    const std::uint64_t offset = domain->allocate(layout.bytes + room.extra);
    auto* block = new (domain->at(offset)) GroupBlock();
    block->size = size;
    block->epoch.store(epoch, std::memory_order_relaxed);  // others learn of the block by what orders this
    block->room = room;
    for (int i = 0; i < size; ++i)
        new (domain->at(offset + layout.mailboxes + static_cast<std::size_t>(i) * sizeof(Mailbox))) Mailbox();
    domain->release_when(offset, [offset, local](Domain& self) {
        for (std::size_t i = 0; i < local.size(); ++i) {
            const bool gone = mailbox_at(self, offset, static_cast<int>(i)).presence.load(std::memory_order_acquire) ==
                              Presence::Gone;
            if (!gone && !self.dead(local[i])) return false;
        }
        return true;
    });
    return offset;
}

void HostGroup::bar(Domain& domain, std::uint64_t block) {
    for (int i = 0; i < domain.at<GroupBlock>(block)->size; ++i) {
        Presence expected = Presence::Expected;
        mailbox_at(domain, block, i).presence.compare_exchange_strong(expected, Presence::Gone);
    }
}

HostGroup::HostGroup(std::shared_ptr<Domain> domain, std::uint64_t block, Members members,
                     std::shared_ptr<HostGroup> epoch)
    : domain_(std::move(domain)),
      offset_(block),
      members_(std::move(members)),
      epoch_(std::move(epoch)),
      block_(domain_->at<GroupBlock>(block)),
      epoch_block_(epoch_ ? epoch_->block_ : block_),
      spin_(default_spin(*domain_)) {
    // A rank that has heard half of what was agreed, because somebody died over it, has too short a list.
    const auto is_ours = [this] { return block_->size == size() && block_->epoch.load() == members_.epoch; };
    Presence expected = Presence::Expected;
    const bool let_in = is_ours() && mailbox(index()).presence.compare_exchange_strong(expected, Presence::Here);
    // Had the block been freed before this rank was in, it may now be that of the next epoch, which it is yet to come
    // to; once it is in the block stays.
    if (let_in && is_ours()) return;
    if (let_in) mailbox(index()).presence.store(Presence::Expected);
    throw Aborted("rank " + std::to_string(rank()) + " came to a group that the others have already given up");
}

HostGroup::~HostGroup() {
    if (!domain_->owned()) return;
    leave();
    // All have come before a group begins its work; who has not come to one that failed never will.
    if (index() == 0) bar(*domain_, offset_);
    mailbox(index()).presence.store(Presence::Gone, std::memory_order_release);
}

Mailbox& HostGroup::mailbox(int member) const { return mailbox_at(*domain_, offset_, member); }

std::byte* HostGroup::inline_slot(int member, std::uint64_t sequence) const {
    const std::size_t slot = static_cast<std::size_t>(member) * 2 + sequence % 2;
    return domain_->at<std::byte>(offset_ + Layout(size(), block_->room).slots + slot * inline_bytes());
}

std::int64_t* HostGroup::splits(int member, std::uint64_t sequence) const {
    const std::size_t row = static_cast<std::size_t>(member) * 2 + sequence % 2;
    return domain_->at<std::int64_t>(offset_ + Layout(size(), block_->room).splits +
                                     row * block_->room.ranks * sizeof(std::int64_t));
}

std::byte* HostGroup::segment(int member, std::uint64_t step) const {
    const std::size_t slot = static_cast<std::size_t>(member) * kSegmentSlots + step % kSegmentSlots;
    return domain_->at<std::byte>(offset_ + Layout(size(), block_->room).segments + slot * segment_bytes());
}

std::byte* HostGroup::extra() const { return domain_->at<std::byte>(offset_ + Layout(size(), block_->room).bytes); }

void HostGroup::post(const Header& header) { mailbox(index()).headers[header.sequence % 2].store(header); }

std::uint64_t HostGroup::arrive() {
    const std::uint64_t gate = ++arrivals_;
    mailbox(index()).arrivals.store(gate, std::memory_order_release);
    const std::uint64_t all = block_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (all == gate * static_cast<std::uint64_t>(size())) {
        block_->last.store(index(), std::memory_order_relaxed);
        block_->released.store(gate, std::memory_order_seq_cst);
        wake_all();
    }
    return gate;
}

std::vector<Header> HostGroup::headers(std::uint64_t sequence) const {
    std::vector<Header> all(static_cast<std::size_t>(size()));
    for (int i = 0; i < size(); ++i) all[static_cast<std::size_t>(i)] = mailbox(i).headers[sequence % 2].load();
    return all;
}

void HostGroup::wake_all() const {
    for (int i = 0; i < size(); ++i) domain_->slot(members_.local[static_cast<std::size_t>(i)]).bell.ring();
}

void HostGroup::check_alive(std::uint64_t gate, bool look_for_dead) {
    if (aborted()) throw Aborted(abort_reason());
    departures_seen_ = epoch_block_->departures.load(std::memory_order_seq_cst);
    for (int i = 0; i < size(); ++i) {
        if (i == index()) continue;
        const bool arrived = mailbox(i).arrivals.load(std::memory_order_acquire) >= gate;
        const int local = members_.local[static_cast<std::size_t>(i)];
        const std::string who = "rank " + std::to_string(members_.ranks[static_cast<std::size_t>(i)]);
        if (!arrived && has_left(local) && !released(gate))
            abort(who + " has left (its cell or script ended) while others wait for it");
        else if (!arrived && members_.epoch != 0 && !released(gate) &&
                 domain_->slot(local).given_up.load(std::memory_order_seq_cst) >= members_.epoch)
            abort(who + " was stopped before it came");
        else if (!arrived && members_.epoch != 0 && !released(gate) && domain_->has_left_run(local, members_.run))
            abort(who + " has ended its cell and will not come");
        else if (look_for_dead && domain_->dead(local) && !released(gate))
            // Also when it has arrived: it may have died before it could release the gate.
            abort(who + " (process " + std::to_string(domain_->slot(local).pid) + ") has died");
    }
    if (aborted()) throw Aborted(abort_reason());
}

void HostGroup::abort(const std::string& reason) {
    std::uint32_t expected = 0;
    if (epoch_block_->aborted.compare_exchange_strong(expected, 1, std::memory_order_seq_cst)) {
        std::strncpy(epoch_block_->reason, reason.c_str(), kReasonBytes - 1);
        epoch_block_->aborted.store(2, std::memory_order_seq_cst);
    }
    if (epoch_) {
        epoch_->wake_all();
    } else {
        wake_all();
    }
}

void HostGroup::abort_from_afar(const std::string& reason) {
    take_announcement();
    abort(reason);
}

std::string HostGroup::abort_reason() const {
    // The writer is a few instructions away from 2, unless it died there.
    for (int i = 0; i < 1000 && epoch_block_->aborted.load(std::memory_order_acquire) == 1; ++i) cpu_yield();
    if (epoch_block_->aborted.load(std::memory_order_acquire) != 2) return "another rank aborted and gave no reason";
    return epoch_block_->reason;
}

HostGroup::Moving::Moving(HostGroup& group) : group_(group) {
    // Pairs with abort() + wait_quiet(): either the aborter sees `busy`, or this sees the abort.
    group_.mailbox(group_.index()).busy.store(1, std::memory_order_seq_cst);
    if (group_.aborted()) {
        group_.mailbox(group_.index()).busy.store(0, std::memory_order_seq_cst);
        throw Aborted(group_.abort_reason());
    }
}

HostGroup::Moving::~Moving() { group_.mailbox(group_.index()).busy.store(0, std::memory_order_release); }

bool HostGroup::quiet() const {
    for (int i = 0; i < size(); ++i)
        if (i != index() && mailbox(i).busy.load(std::memory_order_seq_cst) != 0 &&
            !domain_->dead(members_.local[static_cast<std::size_t>(i)]))
            return false;
    return true;
}

bool HostGroup::wait_quiet() const {
    // Moving never waits for another rank and what writes to others looks for aborts, so this ends as soon as the
    // others get the processor. One that is stopped (SIGSTOP, a debugger) must not make this rank one that cannot be
    // stopped.
    const std::int64_t deadline = monotonic_ns() + kQuiet;
    while (!quiet()) {
        if (monotonic_ns() > deadline) return false;
        cpu_yield();
    }
    return true;
}

bool HostGroup::leave() {
    if (std::exchange(left_, true) || !domain_->owned()) return false;
    Mailbox& own = mailbox(index());
    own.state.store(RankState::Left, std::memory_order_relaxed);
    own.left.store(1, std::memory_order_seq_cst);
    const bool last = block_->left.fetch_add(1, std::memory_order_acq_rel) + 1 == size();
    epoch_block_->departures.fetch_add(1, std::memory_order_seq_cst);
    wake_all();
    return last;
}

bool HostGroup::has_left(int local) const {
    const auto member = std::find(members_.local.begin(), members_.local.end(), local) - members_.local.begin();
    return mailbox(static_cast<int>(member)).left.load(std::memory_order_seq_cst) != 0 ||
           (epoch_ && epoch_->has_left(local));
}

void HostGroup::set_state(RankState state) {
    Mailbox& own = mailbox(index());
    own.state.store(state, std::memory_order_relaxed);
    own.since.store(monotonic_ns(), std::memory_order_relaxed);
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
    std::string text;
    int count = 0;
    for (int i = 0; i < size(); ++i) {
        if (mailbox(i).arrivals.load(std::memory_order_acquire) >= gate) continue;
        text += (count++ ? ", " : "") + std::to_string(members_.ranks[static_cast<std::size_t>(i)]);
    }
    return (count == 1 ? "rank " : "ranks ") + text;
}

}  // namespace ring
