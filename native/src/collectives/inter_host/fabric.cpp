#include "ring/collectives/inter_host/fabric.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace ring {
namespace {

// Tags made of one number: those of a group, then those of its named lane.
constexpr int kChannels = 8;
constexpr int kLaneTags = 4;
// Most bytes of one message: MPI counts with int.
constexpr std::size_t kMostPerMessage = std::size_t{64} << 20;

// Half of the numbers are for generations, which use them in turn; the odd ones are for groups.
int numbers_of_a_kind(const Link& link) { return link.tag_limit() / kChannels / 2; }

std::uint64_t mix(std::uint64_t value) {  // splitmix64
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

void forget(Link& link, int tag) {
    int source = 0;
    std::size_t bytes = 0;
    while (link.probe(tag, source, bytes)) {
        const auto nobody = std::make_shared<std::vector<std::byte>>(bytes);
        Link::Transfer transfer = link.receive(source, tag, nobody->data(), bytes);
        if (!link.done(transfer)) link.cancel(transfer, nobody);
    }
}

}  // namespace

TagNumber::TagNumber(std::shared_ptr<Link> link)
    : link_(std::move(link)), taken_(link_->take_number(numbers_of_a_kind(*link_))) {
    for (int first : {0, kLaneTags})
        for (int channel : {Fabric::kAgreement, Fabric::kData, Fabric::kNotice, Fabric::kMessage})
            forget(*link_, value() * kChannels + first + channel);
}

TagNumber::~TagNumber() {
    if (owner_.is_this_process()) link_->give_back(taken_);
}

int TagNumber::value() const { return 2 * taken_ + 1; }

Fabric::Identity Fabric::generation_identity(const Link& link, std::uint64_t generation, std::size_t members) {
    const auto number = static_cast<int>(2 * (generation % static_cast<std::uint64_t>(numbers_of_a_kind(link))));
    return {mix(generation), std::vector<int>(members, number)};
}

std::uint64_t Fabric::part_id(std::uint64_t number) const { return mix(id() ^ mix(number)); }

Fabric::Fabric(std::shared_ptr<Link> link, std::vector<int> host_of, std::vector<int> addresses, int index,
               Identity identity, const Options& options)
    : link_(std::move(link)),
      host_of_(std::move(host_of)),
      addresses_(std::move(addresses)),
      index_(index),
      identity_(std::move(identity)),
      options_(options) {
    members_.resize(static_cast<std::size_t>(*std::max_element(host_of_.begin(), host_of_.end())) + 1);
    for (int i = 0; i < size(); ++i) members_[static_cast<std::size_t>(this->host_of(i))].push_back(i);
    const std::size_t splits = host_of_.size() * sizeof(std::int64_t);
    message_bytes_ = sizeof(MessageFront) + static_cast<std::size_t>(most_local()) *
                                                (sizeof(Header) + splits + inline_bytes(options_, hosts()));
    // Its receiver does not know its length, so it cannot be sent in parts.
    if (message_bytes_ > kMostPerMessage)
        throw InvalidArgument("the headers and payloads of a host (ranks: " + std::to_string(most_local()) +
                              ") would take " + std::to_string(message_bytes_ >> 20) + " MiB, and at most " +
                              std::to_string(kMostPerMessage >> 20) + " are possible: lower RING_INLINE");
    sent_ = std::make_unique<Counter[]>(members_.size());
    notices_ = std::make_unique<Notices>(*this);
}

int Fabric::local_index(int index) const {
    const std::vector<int>& own = members(host_of(index));
    return static_cast<int>(std::find(own.begin(), own.end(), index) - own.begin());
}

int Fabric::member_at(int address) const {
    const auto found = std::find(addresses_.begin(), addresses_.end(), address);
    return found == addresses_.end() ? -1 : static_cast<int>(found - addresses_.begin());
}

int Fabric::lanes() const {
    std::size_t least = members_.front().size();
    for (const auto& host : members_) least = std::min(least, host.size());
    return static_cast<int>(least);
}

int Fabric::most_local() const {
    std::size_t most = 0;
    for (const auto& host : members_) most = std::max(most, host.size());
    return static_cast<int>(most);
}

int Fabric::tag(Channel channel, int member) const {
    return identity_.numbers[static_cast<std::size_t>(member)] * kChannels + first_tag_ + channel;
}

Link::Transfer Fabric::send(Channel channel, int to, const void* data, std::size_t bytes) const {
    if (bytes == 0) return 0;
    if (channel != kNotice) {
        Counter& counter = sent_[static_cast<std::size_t>(host_of(to))];
        counter.messages.fetch_add(1, std::memory_order_relaxed);
        counter.bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    return link_->send(addresses_[static_cast<std::size_t>(to)], tag(channel, to), data, bytes);
}

Fabric::Sent Fabric::sent(int host) const {
    const Counter& counter = sent_[static_cast<std::size_t>(host)];
    return {counter.messages.load(std::memory_order_relaxed), counter.bytes.load(std::memory_order_relaxed)};
}

Link::Transfer Fabric::receive(Channel channel, int from, void* data, std::size_t bytes) const {
    if (bytes == 0) return 0;
    return link_->receive(addresses_[static_cast<std::size_t>(from)], tag(channel, index_), data, bytes);
}

bool Fabric::has_come(Channel channel, int& source, std::size_t& bytes) const {
    return link_->probe(tag(channel, index_), source, bytes);
}

Link::Transfer Fabric::receive_come(Channel channel, int source, void* data, std::size_t bytes) const {
    return link_->receive(source, tag(channel, index_), data, bytes);
}

std::shared_ptr<Fabric> Fabric::lane() const {
    Identity identity = identity_;
    identity.id = mix(~identity.id);
    auto lane = std::make_shared<Fabric>(link_, host_of_, addresses_, index_, std::move(identity), options_);
    lane->first_tag_ = kLaneTags;
    return lane;
}

bool Fabric::is_called() const {
    int source = 0;
    std::size_t bytes = 0;
    return has_come(kAgreement, source, bytes);
}

bool Fabric::spans(const std::vector<int>& members) const {
    return std::any_of(members.begin(), members.end(),
                       [&](int member) { return host_of(member) != host_of(members.front()); });
}

std::shared_ptr<Fabric> Fabric::part(const std::vector<int>& members, Identity identity) const {
    if (!spans(members)) return nullptr;
    std::vector<int> hosts, addresses, seen;
    int own = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
        const int host = host_of(members[i]);
        auto found = std::find(seen.begin(), seen.end(), host);
        if (found == seen.end()) found = seen.insert(seen.end(), host);
        hosts.push_back(static_cast<int>(found - seen.begin()));
        addresses.push_back(addresses_[static_cast<std::size_t>(members[i])]);
        if (members[i] == index_) own = static_cast<int>(i);
    }
    return std::make_shared<Fabric>(link_, std::move(hosts), std::move(addresses), own, std::move(identity), options_);
}

Transfers::~Transfers() {
    if (fabric_.is_forked()) return;
    for (Link::Transfer& transfer : all_) fabric_.link().cancel(transfer, keep_);
}

// Adds the entry before the transfer begins: a transfer that is not in the list could not be cancelled.
Link::Transfer& Transfers::add(int from) {
    from_.push_back(from);
    return all_.emplace_back(0);
}

void Transfers::send(int to, const void* data, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes; done += kMostPerMessage) {
        Link::Transfer& transfer = add(-1);
        transfer = fabric_.send(channel_, to, static_cast<const std::byte*>(data) + done,
                                std::min(kMostPerMessage, bytes - done));
    }
}

void Transfers::receive(int from, void* data, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes; done += kMostPerMessage) {
        Link::Transfer& transfer = add(from);
        transfer = fabric_.receive(channel_, from, static_cast<std::byte*>(data) + done,
                                   std::min(kMostPerMessage, bytes - done));
    }
}

bool Transfers::done() {
    // One poll for each call: it costs a system call, and drives all transfers of the link.
    while (ended_ < all_.size() && fabric_.link().done(all_[ended_])) ++ended_;
    return ended_ == all_.size();
}

std::vector<int> Transfers::awaited() {
    std::vector<int> members;
    for (std::size_t i = ended_; i < all_.size(); ++i)
        if (from_[i] >= 0 && !fabric_.link().done(all_[i]) && (members.empty() || members.back() != from_[i]))
            members.push_back(from_[i]);
    return members;
}

Window::Window(const Fabric& fabric, int previous, int next, std::uint64_t to_come, std::uint64_t to_send,
               Fabric::Channel channel)
    : fabric_(fabric),
      channel_(channel),
      previous_(previous),
      next_(next),
      to_come_(to_come),
      to_send_(to_send),
      landing_(new std::byte[std::min(to_come, kInFlight) * kMostBytes]) {}

Window::~Window() {
    if (fabric_.is_forked()) return;
    for (Link::Transfer& transfer : sends_) fabric_.link().cancel(transfer, nullptr);
    for (Link::Transfer& transfer : receives_) fabric_.link().cancel(transfer, landing_);
}

bool Window::look_at_sends() {
    const std::uint64_t before = sent_;
    while (sent_ < started_ && fabric_.link().done(sends_[sent_ % kInFlight])) ++sent_;
    return sent_ != before;
}

}  // namespace ring
