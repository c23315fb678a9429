// What flows over a connection of the link over TCP: heads and bodies, one message after another.
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "ring/transport/tcp_link.hpp"

namespace ring {
namespace {

// Less is copied out of the buffer; more goes from the socket to where it belongs.
constexpr std::size_t kDirect = 4 << 10;
// What one look takes from a connection, so that it ends also where the other side sends without end.
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
            pull(rank);  // what it has sent before it went may still be read
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

// Where the next bytes of the body belong, and how many of them; none where they belong nowhere.
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
    parse(rank);  // what there was no memory for before
    for (std::size_t taken = 0; peer.socket >= 0 && taken < kMostAtOnce;) {
        const std::size_t room = peer.in.in_body ? room_in_target(peer) : 0;
        const bool direct = room >= kDirect;
        // Where large messages come, the next one is to lie where it belongs too.
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
        if (n < (direct ? room : 0) + spare) return;  // there is no more
        taken += n;
    }
}

// Takes all that lies in the buffer. Where there is no memory for it, it continues when it is called again.
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
            lose(rank, "has sent what is no message");
        }
    }
}

// A head is complete: finds out where its message goes.
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
        // Somebody has begun to wait for it while it came.
        if (found != peer.wanted.end() && take_arrived(peer, *found)) {
            mark_done(found->transfer);
            peer.wanted.erase(found);
        }
    }
    in.in_body = false;
    in.read = 0;
}

}  // namespace ring
