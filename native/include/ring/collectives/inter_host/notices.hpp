// Notices of an abort, a departure or a standstill to the other hosts of a group, as long as the link works.
//
// Nothing here waits. Every waiting rank calls `send_due` and `read` every 50 ms, and the first to do so sends or reads
// a notice.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ring/group/host_group.hpp"
#include "ring/transport/link.hpp"

namespace ring {

class Fabric;

class Notices {
   public:
    // In place of the last sequence of a departing host: kAbort and kMismatch end the generation, kLeaving means that
    // the sender has left, kStanding that its host stands still. Numbers below kLowest have no effect.
    enum : std::int64_t { kAbort = -1, kLeaving = -2, kMismatch = -3, kStanding = -4, kLowest = kStanding };

    explicit Notices(const Fabric& fabric);
    // Waits a moment until notices are sent; the link keeps those that were not received by then.
    ~Notices();
    Notices(const Notices&) = delete;
    Notices& operator=(const Notices&) = delete;

    // Only the first call of each has an effect. Where memory is short, the notice is sent later.
    void announce_abort(std::string_view reason, bool is_mismatch = false) noexcept;
    // The last rank of a host that leaves calls the first one, for collectives; every rank calls the second one, for
    // the ranks that wait for its messages.
    void announce_departure(std::uint64_t last_sequence) noexcept;
    void announce_leaving() noexcept;
    // Tells the first rank of the first host what the ranks of this host wait for (StandingRanks). Does nothing while
    // an earlier notice is on its way.
    void tell_standstill(std::string_view encoded) noexcept;
    // Adds the standstills of the other hosts. False if one that has not left has told none since `since`.
    bool all_stand_still(StandingRanks& ranks, std::int64_t since) const;
    // Sends what is due.
    void send_due() noexcept;
    // Reads the notices that have arrived: aborts the group, or remembers that a host has left. False when only a part
    // of a notice has arrived.
    bool read(HostGroup& group);
    // The members (group indices) of hosts that will not take part in the operation of that sequence number.
    std::vector<int> departed(std::uint64_t sequence) const;
    // Whether the rank at that address of the link has left.
    bool has_left(int address) const;

   private:
    struct Notice;
    enum Kind : std::size_t { kAbortion, kDeparture, kLeave, kStandstill };
    struct Outgoing;
    struct Incoming {
        std::shared_ptr<Notice> notice;
        int source;  // address
        std::size_t bytes;
        Link::Transfer transfer;
    };
    // Keeps the notice until the process ends, because the link may read it.
    static void keep(std::unique_ptr<Outgoing> outgoing) noexcept;
    void announce(Kind kind, std::int64_t last_sequence, std::string_view reason) noexcept;
    void write(Outgoing& outgoing, std::int64_t last_sequence, std::string_view text) noexcept;
    void send(Outgoing& outgoing) noexcept;
    void forget_sent() noexcept;
    void apply(const Incoming& come, HostGroup& group);

    const Fabric& fabric_;
    mutable std::mutex mutex_;
    // Allocated in advance: a lack of memory may be the reason of an abort.
    std::array<std::unique_ptr<Outgoing>, 4> outgoing_;  // by Kind
    std::vector<Link::Transfer> sending_;
    std::vector<Incoming> arriving_;
    std::vector<int> left_;              // addresses
    std::vector<std::int64_t> left_at_;  // by host: last sequence it takes part in, kAbort while it has not left
    struct Standing {
        std::int64_t told = 0;  // monotonic ns
        std::string encoded;
    };
    std::vector<Standing> standing_;  // by host
};

}  // namespace ring
