// A link over TCP, with one connection for each pair of ranks that exchange messages.
//
// The caller connects and authenticates: the link says which ranks it wants, and takes the sockets. Messages to a rank
// wait until it is connected. Messages of all tags share a connection, one after another; a message without a receiver
// is kept, so that it does not block the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ring/transport/link.hpp"

namespace ring {

class TcpLink : public Link {
   public:
    // Among ranks 0 to `size` - 1, which are its addresses. Tags from kFirstFree on are for `post`.
    explicit TcpLink(int size);
    ~TcpLink() override;

    static constexpr int kFirstFree = 1 << 24;

    Transfer send(int to, int tag, const void* data, std::size_t bytes) override;
    Transfer receive(int from, int tag, void* data, std::size_t bytes) override;
    // Throws PeerLost for a transfer that cannot complete because its peer has gone or cannot be reached: kGrace later,
    // so that the notice in which a leaving rank says why arrives first.
    bool done(Transfer& transfer) override;
    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override;
    bool probe(int tag, int& source, std::size_t& bytes) override;
    // Sends what is left, and waits up to kLinger until the others' kernels have it.
    void drain() override;
    int tag_limit() const override { return kFirstFree - 1; }

    // Readable when the caller has something to do: connect the ranks of `take_wanted`, which have messages waiting, or
    // call `flush`, because a cancelled message was half sent.
    int attention_fd() const { return attention_fd_; }
    std::vector<int> take_wanted();
    // Sends what can be sent. Returns whether something is left; then call it again soon, because a notice may wait
    // whose sender does not use the link any more.
    bool flush();
    // Takes over `socket`, the connection to a rank. Ignored where there is one already.
    void connected(int rank, int socket);
    // No connection to that rank can be made.
    void unreachable(int rank, std::string_view why);

    // The kernel's counts of the connection to a rank: bytes acknowledged, and seconds in which data was on its way,
    // without those in which the receiver's window was full.
    struct Sent {
        int rank;
        double seconds;
        std::uint64_t bytes;
    };
    std::vector<Sent> sent();

    // `post` sends a message that the link keeps until it is sent; `take` returns one that has arrived.
    void post(int to, int tag, std::string_view data);
    std::optional<std::pair<int, std::string>> take(int tag);

   private:
    static constexpr std::uint32_t kMark = 0x52494e47;  // at the start of every message
    static constexpr std::size_t kBuffer = 64 << 10;

    struct Head {
        std::uint32_t mark;
        std::int32_t tag;
        std::uint64_t bytes;
    };
    struct Outgoing {
        Transfer transfer;  // 0 for what was posted
        Head head;
        const std::byte* data;  // null after a cancel: zeros are sent instead
        std::size_t sent;       // of head and data
        std::shared_ptr<std::string> own = nullptr;
    };
    struct Wanted {
        Transfer transfer;
        int tag;
        std::byte* data;
        std::size_t bytes;
    };
    struct Message {
        int tag;
        std::vector<std::byte> body;
    };
    // The message that is being read. It goes to its receive, else into `message`; where the receive was cancelled, or
    // wants less, the rest is discarded.
    struct Incoming {
        Head head{};
        bool in_body = false;
        std::size_t read = 0;  // of the body
        std::optional<Wanted> wanted{};
        Message message{};
    };
    struct Peer {
        int socket = -1;
        bool asked_for = false;
        bool active = false;
        std::int64_t gone_at = 0;  // when the link noticed that the peer has gone; 0 before
        std::string gone;          // and why
        std::deque<Outgoing> out{};
        std::deque<Wanted> wanted{};
        std::deque<Message> arrived{};
        Incoming in{};
        std::unique_ptr<std::byte[]> buffer{};  // of kBuffer bytes: those from begin to end are still to be taken
        std::size_t begin = 0, end = 0;
    };
    struct Live {
        int peer;
        bool done;
    };

    Peer& peer(int rank);
    void queue(int to, Outgoing outgoing);
    void activate(int rank);
    void ask_for_attention() const noexcept;
    void push(int rank);
    void pull(int rank);
    void pull_ready();
    void parse(int rank);
    void take_buffer(int rank);
    void begin_body(int rank);
    std::size_t room_in_target(const Peer& peer) const;
    std::byte* target(Peer& peer) const;
    void end_body(int rank);
    bool take_arrived(Peer& peer, const Wanted& wanted);
    void mark_done(Transfer transfer) noexcept;
    void lose(int rank, std::string_view why);
    void close_own() noexcept;
    void progress();

    int attention_fd_, ask_fd_;
    int poll_fd_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null before the first message
    std::vector<int> active_;                   // ranks with a send or a receive under way
    std::vector<int> wanted_;                   // for take_wanted
    std::map<Transfer, Live> live_;
    Transfer last_ = 0;
    bool starved_ = false;  // memory was short for a message of some peer
};

}  // namespace ring
