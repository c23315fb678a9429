// The link over TCP alone: messages before there is a connection, out of order, cancelled half sent, and peers that go
// or send invalid bytes.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "fakes/intercepted.hpp"
#include "faults/faults.hpp"
#include "ring/base/errors.hpp"
#include "ring/transport/tcp_link.hpp"
#include "support.hpp"

namespace ring::test {
namespace {

constexpr std::size_t kLarge = 5 << 20;  // more than the kernel keeps

struct Pair {
    std::shared_ptr<TcpLink> first = std::make_shared<TcpLink>(2), second = std::make_shared<TcpLink>(2);

    void connect() const {
        int ends[2];
        expect(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
        first->connected(1, ends[0]);
        second->connected(0, ends[1]);
    }
};

std::vector<int> values(std::size_t bytes, int first) {
    std::vector<int> made(bytes / sizeof(int));
    std::iota(made.begin(), made.end(), first);
    return made;
}

// Polls for notices, as waiting ranks do, which also moves messages that no call waits for.
void look(TcpLink& link) { expect(!link.take(TcpLink::kFirstFree + 1), "a message from nowhere"); }

// Polls both sides until both transfers have ended.
void settle(TcpLink& first, Link::Transfer& one, TcpLink& second, Link::Transfer& other) {
    wait_for(
        [&] {
            look(first);
            look(second);
            const bool ended = first.done(one);
            return second.done(other) && ended;
        },
        "both sides have ended");
}

void exchange(const Pair& pair, int tag, std::size_t bytes) {
    const std::vector<int> sent = values(bytes, tag);
    std::vector<int> received(sent.size());
    Link::Transfer send = pair.first->send(1, tag, sent.data(), bytes);
    Link::Transfer receive = pair.second->receive(0, tag, received.data(), bytes);
    settle(*pair.first, send, *pair.second, receive);
    expect(sent == received, "a message of " + std::to_string(bytes) + " bytes arrived as another one");
}

void what_is_sent_waits_for_the_connection() {
    const Pair pair;
    const int value = 7;
    Link::Transfer send = pair.first->send(1, 1, &value, sizeof value);
    int again = 8;
    Link::Transfer later = pair.first->send(1, 2, &again, sizeof again);
    expect(!pair.first->done(send), "a message cannot have left without a connection");
    expect(pair.first->take_wanted() == std::vector<int>{1} && pair.first->take_wanted().empty(),
           "a connection has to be asked for once");
    pair.connect();
    int received[2] = {};
    Link::Transfer second = pair.second->receive(0, 2, &received[1], sizeof(int));
    Link::Transfer first = pair.second->receive(0, 1, &received[0], sizeof(int));
    settle(*pair.first, send, *pair.second, first);
    settle(*pair.first, later, *pair.second, second);
    expect(received[0] == 7 && received[1] == 8, "messages that waited for a connection are wrong");
}

void messages_of_all_sizes() {
    const Pair pair;
    pair.connect();
    int tag = 0;
    for (const std::size_t bytes : {std::size_t{4}, std::size_t{4080}, std::size_t{4096}, std::size_t{65'520},
                                    std::size_t{65'536}, std::size_t{65'540}, std::size_t{262'144}, kLarge})
        for (int times = 0; times < 3; ++times) exchange(pair, ++tag, bytes);
}

// Messages of a tag keep their order, whether their receive began before they arrived, meanwhile, or later.
void messages_that_nobody_has_asked_for() {
    const Pair pair;
    pair.connect();
    const std::vector<int> large = values(kLarge, 0), small = {1, 2, 3};
    Link::Transfer one = pair.first->send(1, 5, large.data(), kLarge);
    Link::Transfer two = pair.first->send(1, 6, small.data(), 12);
    Link::Transfer three = pair.first->send(1, 5, small.data(), 12);
    int source = -1;
    std::size_t bytes = 0;
    expect(!pair.second->probe(5, source, bytes), "a message that has begun to come has not come");
    std::vector<int> received(large.size()), last(3), other(3);
    Link::Transfer wants = pair.second->receive(0, 5, received.data(), kLarge);
    Link::Transfer wants_next = pair.second->receive(0, 5, last.data(), 12);
    settle(*pair.first, one, *pair.second, wants);
    settle(*pair.first, three, *pair.second, wants_next);
    expect(pair.first->done(two), "a message is kept though another one behind it has left");
    expect(pair.second->probe(6, source, bytes) && source == 0 && bytes == 12, "a message that has come is not found");
    Link::Transfer wants_other = pair.second->receive(0, 6, other.data(), 12);
    expect(pair.second->done(wants_other), "a message that has come is there at once");
    expect(received == large && last == small && other == small, "messages were mixed up");
}

void a_message_of_another_length() {
    const Pair pair;
    pair.connect();
    const std::vector<int> sent = values(kLarge, 1);
    std::vector<int> part(1000), whole(sent.size(), -1);
    Link::Transfer send = pair.first->send(1, 1, sent.data(), kLarge);
    Link::Transfer receive = pair.second->receive(0, 1, part.data(), part.size() * sizeof(int));
    settle(*pair.first, send, *pair.second, receive);
    expect(std::equal(part.begin(), part.end(), sent.begin()), "the beginning of a longer message is wrong");
    send = pair.first->send(1, 1, sent.data(), 40);
    receive = pair.second->receive(0, 1, whole.data(), kLarge);
    settle(*pair.first, send, *pair.second, receive);
    expect(whole[9] == 10 && whole[10] == -1, "a shorter message wrote more than it has");
    exchange(pair, 2, 100);
}

// A cancel in the middle of a large message: nothing is written after it, and later messages arrive.
void a_transfer_is_cancelled() {
    for (const bool by_sender : {false, true}) {
        const Pair pair;
        pair.connect();
        std::vector<int> sent = values(kLarge, 1), received(sent.size());
        Link::Transfer send = pair.first->send(1, 1, sent.data(), kLarge);
        Link::Transfer receive = pair.second->receive(0, 1, received.data(), kLarge);
        wait_for([&] { return !pair.second->done(receive) && received.front() != 0; }, "a message has begun to come");
        if (by_sender) {
            pair.first->cancel(send, nullptr);
            sent.assign(sent.size(), -1);
        } else {
            pair.second->cancel(receive, nullptr);
            received.assign(received.size(), -1);
        }
        settle(*pair.first, send, *pair.second, receive);
        if (by_sender)
            expect(received.front() == 1 && received.back() == 0, "a message that was given up ends with zeros");
        else
            expect(received == std::vector<int>(received.size(), -1), "a receive that was cancelled was written to");
        exchange(pair, 1, 1000);
        std::vector<int> nothing(1);
        send = pair.second->receive(0, 9, nothing.data(), 4);
        pair.second->cancel(send, nullptr);
        exchange(pair, 9, 4);
    }
}

void a_peer_goes() {
    for (const bool says_nonsense : {false, true}) {
        const Pair pair;
        int ends[2];
        expect(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
        pair.first->connected(1, ends[0]);
        char value[100] = {};
        Link::Transfer receive = pair.first->receive(1, 1, value, sizeof value);
        Link::Transfer send = pair.first->send(1, 1, value, sizeof value);
        expect(pair.first->done(send), "a small message has not left");
        if (says_nonsense) expect(::write(ends[1], value, sizeof value) == sizeof value, "no write");
        ::close(ends[1]);
        const auto gone = [&] { return fails<Error>([&] { pair.first->done(receive); }); };
        expect(!gone(), "a rank that leaves has a moment to say why");
        wait_for(gone, "a receive from a peer that has gone fails");
        send = pair.first->send(1, 1, value, sizeof value);
        expect(fails<Error>([&] { pair.first->done(send); }), "a send to a peer that has gone must fail");
        pair.first->cancel(receive, nullptr);
        pair.first->cancel(send, nullptr);
        pair.first->drain();
    }
}

void a_rank_cannot_be_reached() {
    const Pair pair;
    const int value = 1;
    Link::Transfer send = pair.first->send(1, 1, &value, sizeof value);
    pair.first->unreachable(1, "cannot be reached");
    wait_for([&] { return fails<Error>([&] { pair.first->done(send); }); }, "a send to a rank out of reach fails");
    pair.first->cancel(send, nullptr);
}

// A message without a receive, for which memory is short, is received when there is memory.
void a_message_finds_no_memory() {
    const Pair pair;
    pair.connect();
    const std::vector<int> sent = values(1000, 1), next = values(100, 5);
    Link::Transfer send = pair.first->send(1, 1, sent.data(), 1000);
    Link::Transfer after = pair.first->send(1, 2, next.data(), 100);
    for (long some = 0;; ++some) {
        const NoMemory none(some);
        int source = 0;
        std::size_t bytes = 0;
        try {
            expect(pair.second->probe(1, source, bytes) && bytes == 1000, "a message is lost");
        } catch (const std::bad_alloc&) {
            continue;
        }
        expect(some > 0, "memory was needed");
        break;
    }
    std::vector<int> received(250), other(25);
    Link::Transfer receive = pair.second->receive(0, 1, received.data(), 1000);
    settle(*pair.first, send, *pair.second, receive);
    receive = pair.second->receive(0, 2, other.data(), 100);
    settle(*pair.first, after, *pair.second, receive);
    expect(received == sent && other == next, "messages were damaged for want of memory");
}

void messages_that_the_link_keeps() {
    const Pair pair;
    constexpr int tag = TcpLink::kFirstFree;
    pair.first->post(1, tag, "before");
    pair.connect();
    pair.first->post(1, tag, "");
    std::vector<std::string> taken;
    wait_for(
        [&] {
            if (auto found = pair.second->take(tag)) taken.push_back(found->second);
            return taken.size() == 2;
        },
        "both messages have come");
    expect(taken == std::vector<std::string>{"before", ""} && !pair.second->take(tag), "posted messages are wrong");
}

}  // namespace

void check_tcp() {
    what_is_sent_waits_for_the_connection();
    messages_of_all_sizes();
    messages_that_nobody_has_asked_for();
    a_message_of_another_length();
    a_transfer_is_cancelled();
    a_peer_goes();
    a_rank_cannot_be_reached();
    a_message_finds_no_memory();
    messages_that_the_link_keeps();
}

}  // namespace ring::test
