// Messages between ranks of different hosts, over the link.
//
// What a rank sends to another begins with a *front*, in order. Up to kSmallBytes the payload follows at once. A larger
// one waits until the receiver has answered that it wants it, and then goes as a *stream* of segments; of two streams
// from one rank to another the second begins when the first has ended, so that segments need no numbers.
//
//   sender                         receiver
//   front, small payload    ->     matched, copied
//   front                   ->     matched
//                           <-     Wanted, or Refused with what was expected
//   segments, four on their way -> copied
//
// Nothing here waits; a lock of its caller makes the calls come one at a time.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "ring/collectives/inter_host/fabric.hpp"

namespace ring {

// What every message between hosts begins with.
struct MessageHead {
    enum class Kind : std::uint32_t { Small, Large, Wanted, Refused };

    std::uint64_t id = 0;      // of the group
    std::uint64_t number = 0;  // the sender's, of the message
    Kind kind = Kind::Small;
    std::int32_t from = 0;  // member
    std::int32_t tag = 0;
    DType dtype = DType::UInt8;
    // Refused: what the receiver had asked for.
    DType wanted_dtype = DType::UInt8;
    std::uint64_t count = 0;
    std::uint64_t wanted_count = 0;

    std::size_t bytes() const { return count * item_size(dtype); }
};

// One that has come and was not matched yet.
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
    LinkMessages(std::shared_ptr<Fabric> fabric, std::shared_ptr<Domain> domain);
    // Gives small messages a moment to leave; the link keeps those that nobody has taken by then.
    ~LinkMessages();
    LinkMessages(const LinkMessages&) = delete;
    LinkMessages& operator=(const LinkMessages&) = delete;

    // Sends to a member on another host. The stream of a large payload; null for a small one, which has been copied.
    std::shared_ptr<Stream> send(int to, int tag, const void* data, std::uint64_t count, DType dtype);
    // Takes what comes; true when anything moved.
    bool advance();
    // The next message that has come, if there is one.
    bool take(RemoteMessage& message);
    // The next small one of this rank that a receiver has refused: its head, and from whom.
    bool take_refusal(MessageHead& head);
    // Has a large one come into `data`.
    std::shared_ptr<Stream> accept(const MessageHead& head, void* data);
    void refuse(MessageHead head, DType wanted_dtype, std::uint64_t wanted_count);
    // Forgets all streams, whose tensors belong to their callers again.
    void drop_streams() noexcept;
    // Whether something of this rank has yet to leave, though no caller waits for it. Any thread may ask.
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
    std::shared_ptr<Domain> domain_;
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
