// The effect of each kind of notice on the group that reads it, and that it has no other.
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "faults/faults.hpp"
#include "ring/collectives/inter_host/fabric.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

constexpr std::uint64_t kId = 77;
constexpr std::int64_t kAbort = Notices::kAbort, kLeaving = Notices::kLeaving;
constexpr int kStranger = 40;
const std::vector<int> kHostOf{0, 1, 1, 2}, kAddresses{7, 5, 9, 3};

// A link on which notices made by the test have arrived.
class Inbox : public Link {
   public:
    void put(int source, std::uint64_t id, std::int64_t last_sequence, const std::string& reason = {}) {
        std::vector<std::byte> bytes(sizeof id + sizeof last_sequence + reason.size() + 1);
        std::memcpy(bytes.data(), &id, sizeof id);
        std::memcpy(bytes.data() + sizeof id, &last_sequence, sizeof last_sequence);
        std::memcpy(bytes.data() + sizeof id + sizeof last_sequence, reason.data(), reason.size());
        come_.emplace_back(source, std::move(bytes));
    }
    Transfer send(int, int, const void*, std::size_t) override { return 0; }
    Transfer receive(int, int, void* data, std::size_t bytes) override {
        std::memcpy(data, come_.front().second.data(), std::min(bytes, come_.front().second.size()));
        come_.pop_front();
        return 0;
    }
    bool done(Transfer&) override { return true; }
    void cancel(Transfer&, std::shared_ptr<const void>) noexcept override {}
    bool probe(int, int& source, std::size_t& bytes) override {
        if (come_.empty()) return false;
        source = come_.front().first;
        bytes = come_.front().second.size();
        return true;
    }
    void drain() override {}
    int tag_limit() const override { return 32767; }

   private:
    std::deque<std::pair<int, std::vector<std::byte>>> come_;
};

// Rank 0, alone on its host, in a group of four ranks on three hosts.
struct Reader {
    std::shared_ptr<RingMemory> ring_memory = RingMemory::create(0, 1, kArena);
    std::shared_ptr<Inbox> link = std::make_shared<Inbox>();
    std::unique_ptr<HostGroup> group;
    std::unique_ptr<Fabric> fabric;

    Reader() {
        auto reservation = std::make_unique<BlockReservation>(ring_memory, std::vector<int>{0}, Room{1, 64, 64, 0});
        const std::uint64_t block = reservation->offset();
        HostGroup::publish(*ring_memory, {0}, block, 1);
        group = std::make_unique<HostGroup>(ring_memory, block, HostGroup::Members{{0}, {0}, 0, 1, 0},
                                            std::move(reservation));
        fabric = std::make_unique<Fabric>(link, kHostOf, kAddresses, 0,
                                          Fabric::Identity{kId, std::vector<int>(kHostOf.size(), 1)}, Options{});
    }

    Notices& read() {
        expect(fabric->notices().read(*group), "a notice that is all there was not read");
        return fabric->notices();
    }
    std::vector<int> departed(std::uint64_t sequence) { return read().departed(sequence); }
    bool anybody_has_left() {
        const Notices& notices = read();
        for (const int address : kAddresses)
            if (notices.has_left(address)) return true;
        return notices.has_left(kStranger);
    }
    // Expects that the generation works, and no rank has gone.
    void expect_untouched(const char* after) {
        expect(!anybody_has_left() && departed(1'000'000).empty() && !group->aborted(),
               std::string("something happened after ") + after);
    }
};

void an_abort_ends_the_generation_for_its_reason() {
    Reader reader;
    reader.link->put(5, kId, kAbort, "rank 1 raised ValueError");
    reader.read();
    expect(reader.group->aborted(), "an abort of another host did not end the generation");
    expect(std::string(reader.group->abort_reason()) == "rank 1 raised ValueError", "an abort lost its reason");
    expect(!reader.anybody_has_left() && reader.departed(1'000'000).empty(), "an abort was taken for a departure");
}

// A reason that fills its field and has no terminating zero.
void a_reason_of_all_bytes() {
    Reader reader;
    reader.link->put(5, kId, kAbort, std::string(2 * kReasonBytes, 'r'));
    reader.read();
    expect(reader.group->aborted(), "an abort with a long reason did not end the generation");
    expect(std::strlen(reader.group->abort_reason()) < kReasonBytes, "a reason is longer than its memory");
}

void one_rank_leaves() {
    Reader reader;
    reader.link->put(9, kId, kLeaving);
    const Notices& notices = reader.read();
    expect(notices.has_left(9), "a rank that has left is still waited for");
    expect(!notices.has_left(5) && !notices.has_left(7) && !notices.has_left(3), "another rank than the one has left");
    expect(notices.departed(1'000'000).empty() && !reader.group->aborted(), "one rank took its host with it");
}

void a_mismatch_ends_the_generation_as_one() {
    Reader reader;
    reader.link->put(5, kId, Notices::kMismatch, "rank 1 called allgather");
    reader.read();
    expect(reader.group->aborted() && reader.group->aborted_by_mismatch(),
           "a mismatch did not end the generation as one");
    expect(!reader.anybody_has_left() && reader.departed(1'000'000).empty(), "a mismatch was taken for a departure");
}

void a_host_that_stands_still_has_not_gone() {
    Reader reader;
    reader.link->put(5, kId, Notices::kStanding, "");
    reader.expect_untouched("a host stands still");
}

void a_host_departs_after_its_last_operation() {
    Reader reader;
    reader.link->put(5, kId, 12);
    expect(reader.departed(12).empty(), "a host is missed in its last operation");
    expect(reader.departed(13) == std::vector<int>{1, 2}, "a host that has departed is waited for");
    reader.link->put(3, kId, 0);
    expect(reader.departed(1) == std::vector<int>{3}, "a host that departed before the first operation is waited for");
    expect((reader.departed(13) == std::vector<int>{1, 2, 3}), "a second departure displaced the first");
    expect(!reader.anybody_has_left() && !reader.group->aborted(), "a departure did more than that");
}

void what_means_nothing_changes_nothing() {
    Reader reader;
    for (const std::int64_t kind : {kAbort, kLeaving, std::int64_t{0}, std::int64_t{12}}) {
        reader.link->put(5, kId + 1, kind, "another group's");
        reader.expect_untouched("a notice of another group");
    }
    for (const std::int64_t kind : {std::int64_t{Notices::kLowest} - 1, INT64_MIN}) {
        reader.link->put(5, kId, kind, "none");
        reader.expect_untouched("a notice of no kind");
    }
    reader.link->put(kStranger, kId, 12);
    reader.expect_untouched("a departure of a host that is not in the group");
}

}  // namespace

void check_notice_kinds() {
    an_abort_ends_the_generation_for_its_reason();
    a_reason_of_all_bytes();
    a_mismatch_ends_the_generation_as_one();
    one_rank_leaves();
    a_host_that_stands_still_has_not_gone();
    a_host_departs_after_its_last_operation();
    what_means_nothing_changes_nothing();
}

}  // namespace ring::test
