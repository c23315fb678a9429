// Messages from one rank to another, matched by sender and tag in the order in which they were sent.
//
// Between hosts they travel as `LinkMessages` says. On one host the sender writes an *envelope* into its own ring
// memory and appends it to the receiver's mailbox, so that no rank needs a connection to another. The payload of an
// envelope is of one of three kinds:
//
//   small     behind the envelope: the send is complete at once, whatever the receiver does
//   pulled    in the sender's tensor, which is in ring memory: the receiver copies it from there
//   streamed  through a window behind the envelope, which the sender fills while the receiver empties it
//
// Only `wait` waits. A thread that waits for a message moves all messages of its group (`advance`); the progress thread
// does so for messages that no thread waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/base/text.hpp"
#include "ring/collectives/inter_host/standstill_watch.hpp"
#include "ring/group/host_group.hpp"
#include "ring/group/recorder.hpp"
#include "ring/messages/link_messages.hpp"

namespace ring {

struct Envelope;

// One message that this rank sends or receives.
class Message {
   public:
    bool done() const { return state_.load(std::memory_order_seq_cst) != State::Pending; }
    // Valid once done. Rethrows the error of a failed message.
    void get() const {
        if (error_) std::rethrow_exception(error_);
    }
    // The member that a received message came from; -1 before.
    int source() const { return source_; }
    // For a message that is done: the time since `begin` for which it waited for the other side. A receive waits until
    // the message arrives; a send that was not copied, until it is received.
    std::int64_t waited_since(std::int64_t begin) const { return std::max<std::int64_t>(0, came_ - begin); }

   private:
    friend class PointToPoint;
    enum class State : int { Pending, Done, Failed };

    Header header_;  // kind, dtype, count and tag, for timelines and errors
    int peer_ = -1;  // member; -1 for any
    int tag_ = 0;
    std::byte* data_ = nullptr;  // only read by a send
    std::size_t bytes_ = 0;
    std::size_t moved_ = 0;            // bytes of a stream
    std::shared_ptr<Stream> stream_;   // to or from another host
    Envelope* envelope_ = nullptr;     // sent or matched
    std::uint64_t offset_ = kNowhere;  // of an envelope that was sent
    std::int64_t deadline_ = 0;
    OperationTimes times_;
    std::int64_t came_ = 0;  // when the other side came
    int source_ = -1;
    bool attended_ = false;
    std::atomic<State> state_{State::Pending};
    std::exception_ptr error_;
};

class PointToPoint {
   public:
    static constexpr int kAny = -1;

    // Where the group is; the departures of its generation count too.
    struct Place {
        std::shared_ptr<HostGroup> group;
        std::shared_ptr<Fabric> fabric;             // null on one host
        std::shared_ptr<Fabric> generation_fabric;  // null where the generation has one host
        std::vector<int> ranks;                     // of all members
        int index;                                  // of this process
        std::shared_ptr<Recorder> recorder;
        std::shared_ptr<StandstillWatch> standstill;
        int number;  // of the group, for timelines
    };
    explicit PointToPoint(Place place);
    // Cancels messages under way. Small messages that were sent can be received as long as their receiver lives.
    ~PointToPoint();
    PointToPoint(const PointToPoint&) = delete;
    PointToPoint& operator=(const PointToPoint&) = delete;

    // To and from members (group indices). Throws Mismatch where the receiver has refused an earlier small message.
    // `attended`: the caller will wait for the message.
    std::shared_ptr<Message> send(int to, int tag, const void* data, std::uint64_t count, DType dtype, double timeout,
                                  bool attended);
    std::shared_ptr<Message> receive(int from, int tag, void* data, std::uint64_t count, DType dtype, double timeout,
                                     bool attended);
    // Returns when the message is done; an interruption aborts the generation.
    void wait(Message& message, double timeout, const Interruption& check);
    // Moves messages as far as possible without waiting; true when anything moved.
    bool advance();
    // For a waiting thread, from time to time. Ends the generation when an expected rank has left or died, or is late.
    void look() noexcept;
    // Whether there are messages that no thread may be waiting for.
    bool unattended() const {
        return unattended_.load(std::memory_order_seq_cst) != 0 || (link_ && link_->is_sending());
    }
    // Whether messages must be polled, because a link rings no bell.
    bool polls() const { return link_ != nullptr; }
    // Fails all messages under way, when the communicator is closed.
    void close(std::exception_ptr error) noexcept;

   private:
    std::shared_ptr<Message> make(OpKind kind, int peer, int tag, void* data, std::uint64_t count, DType dtype,
                                  double timeout, bool attended);
    void check_open(const Message& message);
    void begin(const Message& message);
    // A message from this host or another that has arrived and is not matched yet.
    struct Arrival {
        int from;  // member
        int tag;
        DType dtype;
        std::uint64_t count;
        Envelope* envelope;  // null from another host
        RemoteMessage remote;
    };
    void post(Message& message);
    Envelope* envelope_at(std::uint64_t offset) const;
    void take_arrivals();
    bool match();
    void accept(Message& message, Arrival& arrival);
    void refuse(Message& message, Arrival& arrival);
    static bool has_ended(const Message& message);
    bool settle(Message& message);
    std::exception_ptr refused(const Message& message, std::uint64_t count, DType dtype) const;
    bool advance_locked();
    // The local index of a member; -1 for a member on another host.
    int local(int member) const;
    bool is_gone(int member) const;
    void ring_bell_of(int member) const;
    bool hand_over(Message& message);
    bool fill(Message& message);
    bool empty(Message& message);
    void finish(Message& message, std::exception_ptr error) noexcept;
    void fail_all(const std::exception_ptr& error) noexcept;
    void reap();
    void give_up_envelope(std::uint64_t offset, int to) noexcept;
    void report_wait(const Message& message) const;
    std::string describe(const Message& message) const;
    // Without memory from the heap, of which there may be none.
    FixedText interrupted(const Message& message) const noexcept;
    std::string describe_call(const Message& message) const;
    std::string rank_of(int member) const;

    const Place place_;
    const std::shared_ptr<HostGroup>& group_ = place_.group;
    const std::shared_ptr<Recorder>& recorder_ = place_.recorder;
    std::unique_ptr<LinkMessages> link_;  // null on one host
    std::mutex mutex_;
    std::deque<Arrival> arrived_;                     // and not matched
    std::deque<std::shared_ptr<Message>> wanted_;     // receives that are not matched
    std::deque<std::shared_ptr<Message>> receiving_;  // streams
    std::deque<std::shared_ptr<Message>> sending_;    // until they are received
    struct Posted {
        std::uint64_t offset;
        int to;
    };
    std::deque<Posted> posted_;  // small envelopes whose send is complete
    std::exception_ptr late_;    // of such an envelope
    std::atomic<int> pending_{0};
    std::atomic<int> unattended_{0};
};

}  // namespace ring
