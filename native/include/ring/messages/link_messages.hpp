// Messages between ranks of different hosts, over the link.
//
// A message begins with a *front*; the fronts from one rank to another arrive in order. Up to kSmallBytes the payload
// follows at once. A larger one waits until the receiver answers that it wants it, and then goes as a *stream* of
// segments. Of two streams from one rank to another the second begins when the first has ended, so that segments need
// no numbers.
//
//   sender                         receiver
//   front, small payload    ->     matched, copied
//   front                   ->     matched
//                           <-     Wanted, or Refused with what was expected
//   segments, four on their way -> copied
//
// Nothing here waits. The caller holds a lock, so that calls come one at a time.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "ring/collectives/inter_host/fabric.hpp"

namespace ring {

// The head of every message between hosts.
struct MessageHead {
    enum class Kind : std::uint32_t { Small, Large, Wanted, Refused };

    std::uint64_t id = 0;      // of the group
    std::uint64_t number = 0;  // the sender's, of the message
    Kind kind = Kind::Small;
    std::int32_t from = 0;  // member
    std::int32_t tag = 0;
    DType dtype = DType::UInt8;
    // Refused: the dtype and count that the receiver asked for.
    DType wanted_dtype = DType::UInt8;
    std::uint64_t count = 0;
    std::uint64_t wanted_count = 0;

    std::size_t bytes() const { return count * item_size(dtype); }
};

// A message that has arrived and is not matched yet.
struct RemoteMessage {
    MessageHead head;
    std::shared_ptr<std::byte[]> memory;  // the head again, then the payload of a small one

    const std::byte* payload() const { return memory.get() + sizeof(MessageHead); }
};

// A large payload on its way.
struct Stream {
    enum class State { Announced, Moving, Done, Refused };

    State state = State::Announced;
    MessageHead head;
    int peer = -1;  // member
    std::byte* data = nullptr;
    std::optional<Region> staging;  // of segments that are being sent: a link may read them after an abort
    std::optional<Window> window;
};

class LinkMessages {
   public:
    LinkMessages(std::shared_ptr<Fabric> fabric, std::shared_ptr<RingMemory> ring_memory);
    // Waits a moment until small messages have left; the link keeps those that were not received by then.
    ~LinkMessages();
    LinkMessages(const LinkMessages&) = delete;
    LinkMessages& operator=(const LinkMessages&) = delete;

    // Sends to a member on another host. The stream of a large payload; null for a small one, which has been copied.
    std::shared_ptr<Stream> send(int to, int tag, const void* data, std::uint64_t count, DType dtype);
    // Receives what has arrived and continues streams; true when anything moved.
    bool advance();
    // Takes the next message that has arrived, if there is one.
    bool take(RemoteMessage& message);
    // Takes the head of the next small message of this rank that its receiver has refused.
    bool take_refusal(MessageHead& head);
    // Receives a large message into `data`.
    std::shared_ptr<Stream> accept(const MessageHead& head, void* data);
    void refuse(MessageHead head, DType wanted_dtype, std::uint64_t wanted_count);
    // Drops all streams; their tensors belong to the callers again.
    void drop_streams() noexcept;
    // Whether messages of this rank have not left yet, though no caller waits for them. Any thread may ask.
    bool is_sending() const { return leaving_.load(std::memory_order_seq_cst) != 0; }

   private:
    struct Outgoing {
        std::shared_ptr<std::byte[]> memory;
        Link::Transfer transfer;
    };
    struct Incoming {
        int source;  // address
        std::size_t bytes;
        std::shared_ptr<std::byte[]> memory;
        Link::Transfer transfer;
    };
    void post(int to, const MessageHead& head, const void* payload, std::size_t bytes);
    bool look_at_outgoing();
    bool read();
    void handle(const Incoming& come);
    void check(const MessageHead& head, const Incoming& come) const;
    bool move(Stream& stream) const;
    static bool move_all(std::deque<std::shared_ptr<Stream>>& streams, const LinkMessages& self);

    std::shared_ptr<Fabric> fabric_;
    std::shared_ptr<RingMemory> ring_memory_;
    std::uint64_t last_number_ = 0;
    std::deque<Outgoing> outgoing_;
    std::atomic<std::size_t> leaving_{0};
    std::deque<Incoming> incoming_;
    std::deque<RemoteMessage> come_;
    std::deque<MessageHead> refusals_;
    std::map<std::uint64_t, std::shared_ptr<Stream>> announced_;  // by number
    std::deque<std::shared_ptr<Stream>> sending_;                 // in the order in which they are wanted
    std::deque<std::shared_ptr<Stream>> receiving_;               // in the order in which they were accepted
};

}  // namespace ring
