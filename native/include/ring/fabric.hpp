// The hosts of a group that spans several: who is where, and what crosses between them besides tensors.
//
// Local ranks meet in their HostGroup; between hosts the *agents* work: the leader (local index 0) agrees with the
// other leaders on what each operation is, and lane k (local index k) carries the k-th chunk of a tensor around the
// ring of hosts, so that all links of a host work at once.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/host_group.hpp"
#include "ring/link.hpp"

namespace ring {

// Transfers that belong together, cut to sizes that every link takes; given up when it is destroyed. `done` looks at
// them in the order in which they began, so what takes longest should begin first.
class Transfers {
   public:
    Transfers(Link& link, int tag) : link_(link), tag_(tag) {}
    ~Transfers();
    Transfers(const Transfers&) = delete;
    Transfers& operator=(const Transfers&) = delete;

    void send(int to, const void* data, std::size_t bytes);
    void receive(int from, void* data, std::size_t bytes);
    bool done();

   private:
    Link& link_;
    int tag_;
    std::vector<Link::Transfer> all_;
    std::size_t ended_ = 0;
};

class Fabric {
   public:
    enum Channel { kAgreement = 0, kData = 1, kNotice = 7 };

    // `host_of[i]` is the host of group index i, `addresses[i]` its address on the link. `id` tells groups and epochs
    // apart, and is the same on all members.
    Fabric(std::shared_ptr<Link> link, std::vector<int> host_of, std::vector<int> addresses, int index,
           std::uint64_t id);
    ~Fabric();

    Link& link() const { return *link_; }
    const std::shared_ptr<Link>& shared_link() const { return link_; }
    int hosts() const { return static_cast<int>(members_.size()); }
    int host() const { return host_of_[static_cast<std::size_t>(index_)]; }
    const std::vector<int>& host_of() const { return host_of_; }
    int host_of(int index) const { return host_of_[static_cast<std::size_t>(index)]; }
    int size() const { return static_cast<int>(host_of_.size()); }
    // Group indices of the members on a host, in order.
    const std::vector<int>& members(int host) const { return members_[static_cast<std::size_t>(host)]; }
    int local_index(int index) const;
    int address(int index) const { return addresses_[static_cast<std::size_t>(index)]; }
    int lanes() const;
    int most_local() const;
    int tag(Channel channel) const;
    // What float32 gradients are rounded to while they travel between hosts: float16, bfloat16 or not at all
    // (RING_WIRE).
    DType wire() const { return wire_; }
    std::uint64_t id() const { return id_; }

    // Bytes that a host's part of an agreement may take, and those of the block that holds all of them.
    std::size_t message_bytes() const { return message_bytes_; }
    std::size_t shared_bytes() const { return message_bytes() * static_cast<std::size_t>(hosts()); }

    // The part of this fabric that `members` (group indices) make up; null when they share one host.
    std::shared_ptr<Fabric> part(const std::vector<int>& members, std::uint64_t id) const;

    // --- notices: how an abort or a departure reaches the other hosts ---
    void announce_abort(const std::string& reason);
    void announce_departure(std::uint64_t last_sequence);
    // Takes in what has come: aborts the group, or remembers that a host has left.
    void read_notices(HostGroup& group);
    // The members (group indices) of hosts that will not take part in the operation of that sequence.
    std::vector<int> departed(std::uint64_t sequence) const;

   private:
    struct Notice;
    void announce(const Notice& notice);

    std::shared_ptr<Link> link_;
    std::vector<int> host_of_;
    std::vector<int> addresses_;
    int index_;
    std::uint64_t id_;
    DType wire_;
    std::size_t message_bytes_ = 0;
    std::vector<std::vector<int>> members_;
    std::vector<std::int64_t> left_at_;  // by host: last sequence it takes part in, -1 while it is there
    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<Notice>> sent_;
    std::vector<Link::Transfer> sending_;
};

}  // namespace ring
