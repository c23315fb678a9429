// The exchange between the hosts of a group before each operation: every rank's header, and small payloads.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "ring/collectives/host/algorithm.hpp"
#include "ring/collectives/inter_host/fabric.hpp"
#include "ring/collectives/inter_host/plans.hpp"

namespace ring {

// The leaders send a block of each host to all others, which receive it into memory that their host shares. After the
// gate every rank reads the same headers and so reaches the same verdict.
//
//   block: | MessageFront | Header x 1 or local ranks | splits x local ranks x all ranks | payload |
//
// A host whose ranks all call the same operation sends one header: the offsets of tensors, which differ by rank, mean
// nothing on another host.
//
// Only an alltoall has splits. The payload of an allreduce or reducescatter is the sum over the host; of a broadcast,
// the root's tensor; of the others, the ranks' tensors in turn. It is present only when all tensors of the host fit
// their mailboxes.
//
// Few hosts send their block to each other one. Many pass on what they have got, by a dissemination_plan:
//
//   message: | bytes behind this | BlockRun, block | BlockRun, block | ...
//
// Hosts that call the same thing without a payload have equal blocks, which travel as one. So an operation on large
// tensors takes ceil(log2 hosts) messages of one block.
struct BlockRun {
    std::uint64_t hosts;  // that follow each other and have this block
    std::uint64_t bytes;  // of it
};
// Bytes of the first part of a message; a second one has the rest, because the receiver does not know the length.
constexpr std::size_t kFirstPart = 16 << 10;
inline std::uint64_t packed_messages(std::uint64_t bytes) { return bytes <= kFirstPart - sizeof bytes ? 1 : 2; }

class Agreement : public Algorithm {
   public:
    // `ranks` are the global ranks of all members.
    Agreement(std::shared_ptr<HostGroup> group, const Fabric& fabric, const std::vector<int>& ranks,
              std::uint64_t sequence);
    Step advance(std::uint64_t gates) override;
    // The hosts from which this leader waits for a message. If they pass on what they have got, one of them is silent,
    // and the others may wait for it.
    std::vector<int> awaited_hosts();

    // The rest is valid when the exchange is done. Indices are those of the whole group.
    const std::vector<Header>& headers() const { return headers_; }
    bool all_small() const { return all_small_; }
    // The sum over a host's ranks, or null where all of them have joined.
    const std::byte* partial(int host) const;
    // The payload of that rank; for a broadcast, of the root.
    const std::byte* payload(int index) const;
    const std::int64_t* splits(int index) const;

   private:
    std::byte* message(int host) const;
    MessageFront front(int host) const;
    std::size_t payload_offset(int host) const;
    void write_own();
    void send_to_each();
    // Carries out the rounds of the plan. False while a message is under way.
    bool pass_on();
    void begin_round(const Round& round);
    // Takes the blocks of `hosts` hosts, from `first` on. Throws Error for bytes that no host sends.
    void unpack(int first, int hosts, const std::byte* data, std::size_t bytes);
    std::size_t block_bytes(int host) const;
    void read_all();
    // Throws Error for a message that no host writes.
    void check_message(int host, const MessageFront& front) const;
    // Bytes of one rank's splits.
    std::size_t row_bytes() const { return static_cast<std::size_t>(fabric_.size()) * sizeof(std::int64_t); }

    HostGroup& group_;
    const Fabric& fabric_;
    const std::vector<int>& ranks_;
    std::uint64_t sequence_;
    Transfers transfers_;
    bool started_ = false;
    // Of a round: what is sent lies in ring memory, because a link may read it after an abort.
    const std::vector<Round> rounds_;  // empty where each leader sends to each
    std::size_t round_ = 0;
    std::deque<Region> packed_;
    std::shared_ptr<std::vector<std::byte>> landing_;
    std::optional<Transfers> arriving_;
    bool has_length_ = false;
    std::vector<Header> headers_;
    bool all_small_ = true;
};

// Where the ranks of a host find tensors from other hosts: an offset in ring memory for each group index.
std::uint64_t* landing_places(const HostGroup& group);
std::size_t extra_bytes(const Fabric& fabric);

}  // namespace ring
