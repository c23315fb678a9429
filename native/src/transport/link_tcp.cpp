#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"
#include "ring/memory/memory_file.hpp"
#include "ring/transport/tcp_link.hpp"

namespace ring {
namespace {

constexpr std::int64_t kGrace = 2'000'000'000;       // ns
constexpr std::int64_t kDrainLimit = 2'000'000'000;  // ns
// With more connections, asking the kernel which are ready is cheaper than trying each.
constexpr std::size_t kFewPeers = 2;

std::string error_text(int number) { return std::strerror(number); }

}  // namespace

// Where a sandbox refuses an eventfd, a pipe takes its place; without an epoll each connection is tried.
TcpLink::TcpLink(int size)
    : attention_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ask_fd_(attention_fd_),
      poll_fd_(::epoll_create1(EPOLL_CLOEXEC)) {
    int ends[2];
    if (attention_fd_ < 0 && ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0) {
        attention_fd_ = ends[0];
        ask_fd_ = ends[1];
    }
    if (attention_fd_ < 0 || (poll_fd_ < 0 && has_happened(errno))) {
        const int number = errno;
        close_own();
        throw Error("link: no descriptor for TCP: " + error_text(number));
    }
    peers_.resize(static_cast<std::size_t>(size));
}

void TcpLink::close_own() noexcept {
    if (poll_fd_ >= 0) ::close(poll_fd_);
    if (attention_fd_ >= 0) ::close(attention_fd_);
    if (ask_fd_ != attention_fd_) ::close(ask_fd_);
}

TcpLink::~TcpLink() {
    for (const auto& one : peers_)
        if (one && one->socket >= 0) ::close(one->socket);
    close_own();
}

TcpLink::Peer& TcpLink::peer(int rank) {
    auto& found = peers_.at(static_cast<std::size_t>(rank));
    if (!found) found = std::make_unique<Peer>();
    return *found;
}

void TcpLink::ask_for_attention() const noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(ask_fd_, &one, sizeof one));  // a full counter is already readable
}

void TcpLink::activate(int rank) {
    Peer& peer = this->peer(rank);
    if (!peer.active) active_.push_back(rank);
    peer.active = true;
}

Link::Transfer TcpLink::send(int to, int tag, const void* data, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto noted = live_.emplace(++last_, Live{to, false}).first;
    const Transfer transfer = last_;
    try {
        queue(to, {transfer, {kMark, tag, bytes}, static_cast<const std::byte*>(data), 0});
    } catch (...) {
        live_.erase(noted);
        throw;
    }
    return transfer;
}

void TcpLink::post(int to, int tag, std::string_view data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto own = std::make_shared<std::string>(data);
    queue(to, {0, {kMark, tag, own->size()}, reinterpret_cast<const std::byte*>(own->data()), 0, own});
}

void TcpLink::queue(int to, Outgoing outgoing) {
    activate(to);
    Peer& peer = this->peer(to);
    if (peer.socket < 0 && !peer.asked_for && peer.gone_at == 0) {
        wanted_.push_back(to);
        peer.asked_for = true;
        ask_for_attention();
    }
    peer.out.push_back(std::move(outgoing));
    push(to);
}

Link::Transfer TcpLink::receive(int from, int tag, void* data, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    activate(from);
    Peer& peer = this->peer(from);
    const auto noted = live_.emplace(++last_, Live{from, false}).first;
    const Wanted wanted{last_, tag, static_cast<std::byte*>(data), bytes};
    try {
        noted->second.done = take_arrived(peer, wanted);
        if (!noted->second.done) peer.wanted.push_back(wanted);
    } catch (...) {
        live_.erase(noted);
        throw;
    }
    return wanted.transfer;
}

// Completes a receive from the oldest message of its tag, if one has arrived.
bool TcpLink::take_arrived(Peer& peer, const Wanted& wanted) {
    const auto found = std::find_if(peer.arrived.begin(), peer.arrived.end(),
                                    [&](const Message& message) { return message.tag == wanted.tag; });
    if (found == peer.arrived.end()) return false;
    if (const std::size_t n = std::min(found->body.size(), wanted.bytes))
        std::memcpy(wanted.data, found->body.data(), n);
    peer.arrived.erase(found);
    return true;
}

void TcpLink::mark_done(Transfer transfer) noexcept {
    const auto found = live_.find(transfer);
    if (found != live_.end()) found->second.done = true;
}

bool TcpLink::done(Transfer& transfer) {
    if (transfer == 0) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(transfer);
    if (!found->second.done) progress();
    if (!found->second.done) {
        const Peer& peer = this->peer(found->second.peer);
        if (peer.gone_at != 0 && monotonic_ns() - peer.gone_at > kGrace)
            throw PeerLost("link: rank " + std::to_string(found->second.peer) + " " + peer.gone);
        return false;
    }
    live_.erase(found);
    transfer = 0;
    return true;
}

void TcpLink::cancel(Transfer& transfer, std::shared_ptr<const void>) noexcept {
    if (transfer == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(transfer);
    Peer& peer = *peers_[static_cast<std::size_t>(found->second.peer)];
    // A message whose head was sent must be completed, or the reader loses its position in the stream.
    for (auto out = peer.out.begin(); out != peer.out.end(); ++out)
        if (out->transfer == transfer) {
            if (out->sent == 0) {
                peer.out.erase(out);
            } else {
                out->data = nullptr;
                ask_for_attention();
            }
            break;
        }
    const auto is_it = [&](const Wanted& wanted) { return wanted.transfer == transfer; };
    peer.wanted.erase(std::remove_if(peer.wanted.begin(), peer.wanted.end(), is_it), peer.wanted.end());
    if (peer.in.wanted && is_it(*peer.in.wanted)) peer.in.wanted->data = nullptr;
    live_.erase(found);
    transfer = 0;
}

bool TcpLink::probe(int tag, int& source, std::size_t& bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    progress();  // a cancelled message that was half sent may block others
    pull_ready();
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank]) continue;
        for (const Message& message : peers_[rank]->arrived)
            if (message.tag == tag) {
                source = static_cast<int>(rank);
                bytes = message.body.size();
                return true;
            }
    }
    return false;
}

std::optional<std::pair<int, std::string>> TcpLink::take(int tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    progress();
    pull_ready();
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank]) continue;
        auto& arrived = peers_[rank]->arrived;
        const auto found =
            std::find_if(arrived.begin(), arrived.end(), [&](const Message& message) { return message.tag == tag; });
        if (found == arrived.end()) continue;
        std::string data(reinterpret_cast<const char*>(found->body.data()), found->body.size());
        arrived.erase(found);
        return std::pair{static_cast<int>(rank), std::move(data)};
    }
    return std::nullopt;
}

bool TcpLink::flush() {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool is_left = false;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank]) continue;
        push(static_cast<int>(rank));
        is_left = is_left || (peers_[rank]->socket >= 0 && !peers_[rank]->out.empty());
    }
    return is_left;
}

void TcpLink::drain() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t deadline = monotonic_ns() + kDrainLimit;
    const auto is_left = [](const std::unique_ptr<Peer>& one) {
        if (!one || one->socket < 0) return false;
        int unsent = 0;
        return !one->out.empty() || (::ioctl(one->socket, SIOCOUTQ, &unsent) == 0 && unsent > 0);
    };
    do {
        progress();
        pull_ready();  // closing a socket with unread data discards the data that it has sent
        if (std::none_of(peers_.begin(), peers_.end(), is_left)) return;
        cpu_yield();
    } while (monotonic_ns() < deadline);
}

std::vector<TcpLink::Sent> TcpLink::sent() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Sent> all;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank] || peers_[rank]->socket < 0) continue;
        tcp_info info{};
        socklen_t size = sizeof info;
        if (::getsockopt(peers_[rank]->socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
        // A kernel that does not count leaves zeros.
        const auto busy =
            static_cast<double>(info.tcpi_busy_time - std::min(info.tcpi_busy_time, info.tcpi_rwnd_limited));
        all.push_back({static_cast<int>(rank), busy * 1e-6, info.tcpi_bytes_acked});
    }
    return all;
}

std::vector<int> TcpLink::take_wanted() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::uint64_t count = 0;
    while (::read(attention_fd_, &count, sizeof count) > 0) {  // fails when the counter is 0, or the pipe empty
    }
    return std::exchange(wanted_, {});
}

void TcpLink::connected(int rank, int socket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Peer& peer = this->peer(rank);
    if (peer.socket >= 0 || !peer.gone.empty()) {
        ::close(socket);
        return;
    }
    peer.buffer.reset(new std::byte[kBuffer]);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<std::uint32_t>(rank);
    if (poll_fd_ >= 0 && ::epoll_ctl(poll_fd_, EPOLL_CTL_ADD, socket, &event) != 0) {
        const int number = errno;
        ::close(socket);
        lose(rank, "has no connection: " + error_text(number));
        return;
    }
    peer.socket = socket;
    push(rank);
}

void TcpLink::unreachable(int rank, std::string_view why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (peer(rank).socket < 0) lose(rank, why);
}

void TcpLink::lose(int rank, std::string_view why) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    if (peer.socket >= 0) ::close(std::exchange(peer.socket, -1));
    if (peer.gone_at != 0) return;
    peer.gone_at = monotonic_ns();
    peer.gone = why;
}

// Advances all transfers under way.
void TcpLink::progress() {
    const auto is_idle = [&](int rank) {
        Peer& peer = *peers_[static_cast<std::size_t>(rank)];
        peer.active = !peer.out.empty() || !peer.wanted.empty() || peer.in.wanted;
        return !peer.active;
    };
    active_.erase(std::remove_if(active_.begin(), active_.end(), is_idle), active_.end());
    for (std::size_t i = 0; i < active_.size(); ++i) push(active_[i]);
    if (active_.size() > kFewPeers && poll_fd_ >= 0) {
        pull_ready();
    } else {
        for (std::size_t i = 0; i < active_.size(); ++i) pull(active_[i]);
    }
}

void TcpLink::pull_ready() {
    if (starved_ || poll_fd_ < 0) {
        starved_ = false;
        for (std::size_t rank = 0; rank < peers_.size(); ++rank)
            if (peers_[rank]) pull(static_cast<int>(rank));
    }
    epoll_event events[64];
    const int n = ::epoll_wait(poll_fd_, events, 64, 0);
    for (int i = 0; i < n; ++i) pull(static_cast<int>(events[i].data.u32));
}

namespace {

// Fewer bytes are copied out of the buffer; more are read from the socket into their destination.
constexpr std::size_t kDirect = 4 << 10;
// Most bytes that one call reads from a connection, so that it returns even if the other side never stops sending.
constexpr std::size_t kMostAtOnce = 4 << 20;
constexpr std::size_t kLongest = std::size_t{1} << 32;
const std::array<std::byte, 64 << 10> kZeros{};

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

void TcpLink::push(int rank) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    while (peer.socket >= 0 && !peer.out.empty()) {
        iovec pieces[16];
        int count = 0;
        for (auto out = peer.out.begin(); out != peer.out.end() && count < 14; ++out) {
            if (out->sent < sizeof(Head))
                pieces[count++] = {reinterpret_cast<std::byte*>(&out->head) + out->sent, sizeof(Head) - out->sent};
            const std::size_t body = out->sent < sizeof(Head) ? 0 : out->sent - sizeof(Head);
            const std::size_t left = out->head.bytes - body;
            if (left == 0) continue;
            if (out->data == nullptr) {
                pieces[count++] = {const_cast<std::byte*>(kZeros.data()), std::min(left, kZeros.size())};
                if (left > kZeros.size()) break;
            } else {
                pieces[count++] = {const_cast<std::byte*>(out->data) + body, left};
            }
        }
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = static_cast<std::size_t>(count);
        const ssize_t sent = ::sendmsg(peer.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (would_block()) return;
            const std::string why = std::strerror(errno);
            pull(rank);  // data that the peer sent before it went can still be read
            lose(rank, "has gone: " + why);
            return;
        }
        auto left = static_cast<std::size_t>(sent);
        while (!peer.out.empty()) {
            Outgoing& out = peer.out.front();
            const std::size_t part = std::min(left, sizeof(Head) + out.head.bytes - out.sent);
            out.sent += part;
            left -= part;
            if (out.sent < sizeof(Head) + out.head.bytes) break;
            mark_done(out.transfer);
            peer.out.pop_front();
        }
    }
}

// The destination of the next bytes of the body; null where they are discarded.
std::byte* TcpLink::target(Peer& peer) const {
    Incoming& in = peer.in;
    if (!in.wanted) return in.message.body.data() + in.read;
    return in.wanted->data == nullptr ? nullptr : in.wanted->data + in.read;
}

std::size_t TcpLink::room_in_target(const Peer& peer) const {
    const Incoming& in = peer.in;
    if (!in.wanted) return in.head.bytes - in.read;
    if (in.wanted->data == nullptr || in.read >= in.wanted->bytes) return 0;
    return std::min<std::size_t>(in.head.bytes, in.wanted->bytes) - in.read;
}

void TcpLink::pull(int rank) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    parse(rank);  // data for which memory was short before
    for (std::size_t taken = 0; peer.socket >= 0 && taken < kMostAtOnce;) {
        const std::size_t room = peer.in.in_body ? room_in_target(peer) : 0;
        const bool direct = room >= kDirect;
        // After a large message, read little ahead: the next one should also go directly to its destination.
        const std::size_t spare = peer.in.head.bytes > kBuffer ? kDirect : kBuffer;
        iovec pieces[2];
        int count = 0;
        if (direct) pieces[count++] = {target(peer), room};
        pieces[count++] = {peer.buffer.get(), spare};
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = static_cast<std::size_t>(count);
        const ssize_t got = ::recvmsg(peer.socket, &message, MSG_DONTWAIT);
        if (got == 0) {
            lose(rank, "has closed its connection: its process has ended");
            return;
        }
        if (got < 0) {
            if (!would_block()) lose(rank, std::string("has gone: ") + std::strerror(errno));
            return;
        }
        const auto n = static_cast<std::size_t>(got);
        const std::size_t landed = direct ? std::min(n, room) : 0;
        peer.in.read += landed;
        peer.begin = 0;
        peer.end = n - landed;
        parse(rank);
        if (n < (direct ? room : 0) + spare) return;  // the socket is empty
        taken += n;
    }
}

// Parses the whole buffer. Where memory is short, the next call continues.
void TcpLink::parse(int rank) {
    try {
        take_buffer(rank);
    } catch (...) {
        starved_ = true;
        throw;
    }
}

void TcpLink::take_buffer(int rank) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    Incoming& in = peer.in;
    const auto is_due = [&] { return in.read == (in.in_body ? in.head.bytes : sizeof(Head)); };
    while (peer.begin < peer.end || is_due()) {
        const std::byte* data = peer.buffer.get() + peer.begin;
        const std::size_t there = peer.end - peer.begin;
        const std::size_t part = std::min<std::size_t>(there, (in.in_body ? in.head.bytes : sizeof(Head)) - in.read);
        if (!in.in_body) {
            if (part != 0) std::memcpy(reinterpret_cast<std::byte*>(&in.head) + in.read, data, part);
        } else if (const std::size_t n = std::min(part, room_in_target(peer))) {
            std::memcpy(target(peer), data, n);
        }
        peer.begin += part;
        in.read += part;
        if (!is_due()) continue;
        if (in.in_body) {
            end_body(rank);
        } else if (in.head.mark == kMark && in.head.bytes <= kLongest) {
            begin_body(rank);
        } else {
            peer.begin = peer.end = in.read = 0;
            lose(rank, "has sent bytes that are no message");
        }
    }
}

// A head is complete: finds the destination of its message.
void TcpLink::begin_body(int rank) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    Incoming& in = peer.in;
    const auto found = std::find_if(peer.wanted.begin(), peer.wanted.end(),
                                    [&](const Wanted& wanted) { return wanted.tag == in.head.tag; });
    if (found != peer.wanted.end()) {
        in.wanted = *found;
        peer.wanted.erase(found);
    } else {
        in.message = {in.head.tag, std::vector<std::byte>(in.head.bytes)};
    }
    in.in_body = true;
    in.read = 0;
}

void TcpLink::end_body(int rank) {
    Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    Incoming& in = peer.in;
    if (in.wanted) {
        mark_done(in.wanted->transfer);
        in.wanted.reset();
    } else {
        const auto found = std::find_if(peer.wanted.begin(), peer.wanted.end(),
                                        [&](const Wanted& wanted) { return wanted.tag == in.message.tag; });
        peer.arrived.push_back(std::move(in.message));
        in.message = {};
        // A receive has begun while the message arrived.
        if (found != peer.wanted.end() && take_arrived(peer, *found)) {
            mark_done(found->transfer);
            peer.wanted.erase(found);
        }
    }
    in.in_body = false;
    in.read = 0;
}

}  // namespace ring
