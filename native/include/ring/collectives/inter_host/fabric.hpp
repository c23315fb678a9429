// The hosts of a group that spans several: which member is on which host, and the messages between hosts.
//
// Local ranks meet in their HostGroup; between hosts the *agents* work: the leader (local index 0) agrees with the
// other leaders on what each operation is, and lane k (local index k) carries the k-th chunk of a tensor around the
// ring of hosts, so that all links of a host work at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ring/base/process.hpp"
#include "ring/collectives/inter_host/notices.hpp"
#include "ring/group/host_group.hpp"
#include "ring/transport/link.hpp"

namespace ring {

// A number from which the tags of a group's messages are made, in use for the lifetime of this object. Each member has
// its own, and the others send it messages with that number: so no two groups of a process share a tag, and the ranks
// need not agree on one.
class TagNumber {
   public:
    // Discards messages with these tags that were sent to a group that has ended.
    explicit TagNumber(std::shared_ptr<Link> link);
    ~TagNumber();
    TagNumber(const TagNumber&) = delete;
    TagNumber& operator=(const TagNumber&) = delete;

    int value() const;

   private:
    std::shared_ptr<Link> link_;
    const Owner owner_;
    int taken_;
};

// The head of a host's part of an agreement.
struct MessageFront {
    std::uint64_t id, sequence;  // of the group, and of the operation in it
    std::uint64_t headers;       // one for each rank of the host, or one that all of them share
    std::uint64_t splits;        // bytes of them
    std::uint64_t payload;       // bytes of it, or kNoPayload
    std::uint64_t most;          // most bytes of a rank's payload in this message: RING_INLINE, in whole pages
};

class Fabric {
   public:
    // A named lane uses tags 4 to 6 of its group for the first three. It has no messages, so kPayload is tag 7.
    enum Channel { kAgreement = 0, kData = 1, kNotice = 2, kMessage = 3, kPayload = 7 };

    // Distinguishes the messages of a group from all others.
    struct Identity {
        std::uint64_t id = 0;                       // the same on all members, unique to the group
        std::vector<int> numbers;                   // by group index: for the tags of messages to that member
        std::shared_ptr<const TagNumber> own = {};  // null where the number is the generation's
    };
    // The identity of a generation's first group. Generations have numbers that no other group has; only generations
    // that ended long ago can have the same one.
    static Identity generation_identity(const Link& link, std::uint64_t generation, std::size_t members);
    // The id of a part of this group; each part has another `number`.
    std::uint64_t part_id(std::uint64_t number) const;

    // `host_of[i]` is the host of group index i, `addresses[i]` its address on the link.
    Fabric(std::shared_ptr<Link> link, std::vector<int> host_of, std::vector<int> addresses, int index,
           Identity identity, const Options& options);

    Link& link() const { return *link_; }
    const std::shared_ptr<Link>& shared_link() const { return link_; }
    int hosts() const { return static_cast<int>(members_.size()); }
    int host() const { return host_of_[static_cast<std::size_t>(index_)]; }
    const std::vector<int>& host_of() const { return host_of_; }
    int host_of(int index) const { return host_of_[static_cast<std::size_t>(index)]; }
    // A forked process does not touch the link: its messages, and the locks of its threads, belong to the parent.
    bool is_forked() const { return !owner_.is_this_process(); }
    int size() const { return static_cast<int>(host_of_.size()); }
    int index() const { return index_; }  // of this process
    // Group indices of the members on a host, in order.
    const std::vector<int>& members(int host) const { return members_[static_cast<std::size_t>(host)]; }
    int local_index(int index) const;
    int lanes() const;
    int most_local() const;
    // To or from a member on another host. Nothing travels where there are no bytes.
    Link::Transfer send(Channel channel, int to, const void* data, std::size_t bytes) const;
    Link::Transfer receive(Channel channel, int from, void* data, std::size_t bytes) const;
    // What this rank has sent to a host in operations of the group so far.
    struct Sent {
        std::uint64_t messages = 0, bytes = 0;
    };
    Sent sent(int host) const;
    // The type that float32 sums are rounded to between hosts; float32 does not round.
    DType wire() const { return options_.wire; }
    std::uint64_t id() const { return identity_.id; }

    // Most bytes of one host's part of an agreement, and bytes of the block that holds all parts.
    std::size_t message_bytes() const { return message_bytes_; }
    std::size_t shared_bytes() const { return message_bytes() * static_cast<std::size_t>(hosts()); }

    // The same hosts again, with tags of their own: for the group's named lane.
    std::shared_ptr<Fabric> lane() const;
    // Whether another leader has begun an agreement; asked by a leader that has none under way.
    bool is_called() const;

    // Whether these members (group indices) are on more than one host.
    bool spans(const std::vector<int>& members) const;
    // The part of this fabric that `members` (group indices) make up; null when they share one host.
    std::shared_ptr<Fabric> part(const std::vector<int>& members, Identity identity) const;

    // Whether a message of this group for this rank has arrived, its source address and its size; and how to receive
    // it.
    bool has_come(Channel channel, int& source, std::size_t& bytes) const;
    Link::Transfer receive_come(Channel channel, int source, void* data, std::size_t bytes) const;
    Notices& notices() { return *notices_; }
    // The address of a member on the link, and the member at an address; -1 for none.
    int address(int member) const { return addresses_[static_cast<std::size_t>(member)]; }
    int member_at(int address) const;

   private:
    int tag(Channel channel, int member) const;

    struct Counter {
        std::atomic<std::uint64_t> messages{0}, bytes{0};
    };

    const Owner owner_;
    std::shared_ptr<Link> link_;
    std::vector<int> host_of_;
    std::vector<int> addresses_;
    int index_;
    Identity identity_;
    Options options_;
    int first_tag_ = 0;  // of those that belong to a number
    std::size_t message_bytes_ = 0;
    std::vector<std::vector<int>> members_;
    std::unique_ptr<Counter[]> sent_;   // by host
    std::unique_ptr<Notices> notices_;  // last: its destructor sends what is due
};

// Transfers that belong together, cut to sizes that every link takes; the destructor cancels them. `done` checks them
// in the order in which they began, so begin with the longest.
class Transfers {
   public:
    // `keep` owns the memory of what is received.
    Transfers(const Fabric& fabric, Fabric::Channel channel, std::shared_ptr<const void> keep)
        : fabric_(fabric), channel_(channel), keep_(std::move(keep)) {}
    ~Transfers();
    Transfers(const Transfers&) = delete;
    Transfers& operator=(const Transfers&) = delete;

    // To and from members (group indices) on other hosts.
    void send(int to, const void* data, std::size_t bytes);
    void receive(int from, void* data, std::size_t bytes);
    bool done();
    // The members from which something has not come, each once where its parts follow each other.
    std::vector<int> awaited();

   private:
    Link::Transfer& add(int from);

    const Fabric& fabric_;
    Fabric::Channel channel_;
    std::shared_ptr<const void> keep_;
    std::vector<Link::Transfer> all_;
    std::vector<int> from_;  // of each; -1 for what is sent
    std::size_t ended_ = 0;
};

// The messages that a lane receives from the previous host and sends to the next one: one stream each way, in order,
// with a few messages under way. They are received into memory of this object, so that a message for an operation that
// was given up cannot write into its tensor.
class Window {
   public:
    static constexpr std::size_t kMostBytes = 256 << 10;  // of a message
    // In each direction: while one is reduced the next ones are on the wire.
    static constexpr std::uint64_t kInFlight = 4;

    Window(const Fabric& fabric, int previous, int next, std::uint64_t to_come, std::uint64_t to_send,
           Fabric::Channel channel = Fabric::kData);
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    // Asks for the next messages; message m has bytes(m). True when there was one to ask for.
    template <class Bytes>
    bool ask(Bytes&& bytes) {
        bool any = false;
        for (; asked_ < to_come_ && asked_ < taken_ + kInFlight; ++asked_, any = true)
            receives_[asked_ % kInFlight] =
                fabric_.receive(channel_, previous_, landing(asked_), static_cast<std::size_t>(bytes(asked_)));
        return any;
    }
    // Whether message number taken() has arrived. It stays in landing() until it is taken.
    bool has_come() { return taken_ < asked_ && fabric_.link().done(receives_[taken_ % kInFlight]); }
    std::byte* landing(std::uint64_t m) const { return landing_.get() + m % kInFlight * kMostBytes; }
    void take() { ++taken_; }
    bool may_send() const { return started_ < to_send_ && started_ < sent_ + kInFlight; }
    // Sends message number started(), from ring memory.
    void send(const void* data, std::size_t bytes) {
        sends_[started_ % kInFlight] = fabric_.send(channel_, next_, data, bytes);
        ++started_;
    }
    // True when any message has left since the last call.
    bool look_at_sends();

    // Messages so far.
    std::uint64_t taken() const { return taken_; }
    std::uint64_t started() const { return started_; }
    std::uint64_t sent() const { return sent_; }
    bool done() const { return taken_ == to_come_ && sent_ == to_send_; }

   private:
    const Fabric& fabric_;
    Fabric::Channel channel_;
    int previous_, next_;
    std::uint64_t to_come_, to_send_;
    std::shared_ptr<std::byte[]> landing_;  // not zeroed: that would cost as much as to receive
    Link::Transfer sends_[kInFlight] = {};
    Link::Transfer receives_[kInFlight] = {};
    std::uint64_t asked_ = 0, taken_ = 0, started_ = 0, sent_ = 0;
};

}  // namespace ring
