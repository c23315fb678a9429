// A link over TCP, one connection for each pair of ranks that have something to tell each other.
//
// The caller makes the connections and makes sure who is at the other end: the link says which ranks it wants, and
// takes the sockets. What is sent to a rank before that waits. Messages of any tag share a connection, one after
// another; what nobody has asked for yet is kept, so that none of them holds up another one.
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
    // Throws PeerLost for a transfer that its peer, which has gone or cannot be reached, will never complete: kGrace
    // after that was noticed, because a rank that leaves has said why.
    bool done(Transfer& transfer) override;
    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override;
    bool probe(int tag, int& source, std::size_t& bytes) override;
    // Sends what is left, and waits up to kLinger until the others' kernels have it.
    void drain() override;
    int tag_limit() const override { return kFirstFree - 1; }

    // Readable when the caller has something to do: connect the ranks in `take_wanted`, which something is to be sent
    // to, or call `flush`, because a message was given up half sent.
    int attention_fd() const { return attention_fd_; }
    std::vector<int> take_wanted();
    // Sends what can be sent. Returns whether something is left, so that this is to be called again soon: it may stand
    // before a notice, and its sender may not look at the link any more.
    bool flush();
    // The connection to a rank: a socket, which is the link's from now on. Ignored where there is one already.
    void connected(int rank, int socket);
    // No connection to that rank can be made.
    void unreachable(int rank, std::string_view why);

    // A message that the link keeps until it is sent; and one of such a tag that has arrived: source and data.
    void post(int to, int tag, std::string_view data);
    std::optional<std::pair<int, std::string>> take(int tag);

   private:
    static constexpr std::uint32_t kMark = 0x52494e47;  // what every message begins with
    static constexpr std::size_t kBuffer = 64 << 10;

    struct Head {
        std::uint32_t mark;
        std::int32_t tag;
        std::uint64_t bytes;
    };
    struct Outgoing {
        Transfer transfer;  // 0 for what was posted
        Head head;
        const std::byte* data;  // null once given up: zeros are sent instead
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
    // What is being read. A message goes where somebody waits for it, else into `message`; where its receiver has given
    // up, or wants less, the rest goes nowhere.
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
        std::int64_t gone_at = 0;  // when it was found to have gone; 0 while it has not
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
    void progress();

    int attention_fd_;
    int poll_fd_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for those that nothing was exchanged with
    std::vector<int> active_;                   // ranks that something is sent to, or wanted from
    std::vector<int> wanted_;                   // for take_wanted
    std::map<Transfer, Live> live_;
    Transfer last_ = 0;
    bool starved_ = false;  // some peer has sent what there was no memory for
};

}  // namespace ring
