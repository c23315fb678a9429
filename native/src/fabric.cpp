#include "ring/fabric.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ring {
namespace {

// MPI counts with int; shorter messages also let a transfer be given up sooner.
constexpr std::size_t kMostPerMessage = std::size_t{64} << 20;
constexpr std::int64_t kAbort = -1;
constexpr std::int64_t kLinger = 100'000'000;  // ns

DType wire_asked_for() {
    const char* text = std::getenv("RING_WIRE");
    if (text != nullptr && std::strcmp(text, "float16") == 0) return DType::Float16;
    if (text != nullptr && std::strcmp(text, "bfloat16") == 0) return DType::BFloat16;
    return DType::Float32;
}

}  // namespace

struct Fabric::Notice {
    std::int64_t last_sequence;  // kAbort: the epoch has ended
    std::int32_t host;
    char reason[kReasonBytes];
};

Transfers::~Transfers() {
    for (Link::Transfer& transfer : all_) link_.cancel(transfer);
}

void Transfers::send(int to, const void* data, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes; done += kMostPerMessage)
        all_.push_back(
            link_.send(to, tag_, static_cast<const std::byte*>(data) + done, std::min(kMostPerMessage, bytes - done)));
}

void Transfers::receive(int from, void* data, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes; done += kMostPerMessage)
        all_.push_back(
            link_.receive(from, tag_, static_cast<std::byte*>(data) + done, std::min(kMostPerMessage, bytes - done)));
}

bool Transfers::done() {
    // One look a call: it costs a system call, and drives all transfers of the link.
    while (ended_ < all_.size() && link_.done(all_[ended_])) ++ended_;
    return ended_ == all_.size();
}

Fabric::Fabric(std::shared_ptr<Link> link, std::vector<int> host_of, std::vector<int> addresses, int index,
               std::uint64_t id)
    : link_(std::move(link)),
      host_of_(std::move(host_of)),
      addresses_(std::move(addresses)),
      index_(index),
      id_(id),
      wire_(wire_asked_for()) {
    members_.resize(static_cast<std::size_t>(*std::max_element(host_of_.begin(), host_of_.end())) + 1);
    for (int i = 0; i < size(); ++i) members_[static_cast<std::size_t>(this->host_of(i))].push_back(i);
    left_at_.assign(members_.size(), kAbort);
    const std::size_t splits = host_of_.size() * sizeof(std::int64_t);
    message_bytes_ = sizeof(std::uint64_t) +
                     static_cast<std::size_t>(most_local()) * (sizeof(Header) + splits + inline_bytes(hosts()));
}

Fabric::~Fabric() {
    // Notices must arrive although their sender goes, and the link reads them until they have. One that nobody takes
    // in time is left to it.
    const std::int64_t deadline = monotonic_ns() + kLinger;
    bool sent = false;
    do {
        sending_.erase(
            std::remove_if(sending_.begin(), sending_.end(), [&](Link::Transfer& one) { return link_->done(one); }),
            sending_.end());
        sent = sending_.empty();
        if (!sent) cpu_yield();
    } while (!sent && monotonic_ns() < deadline);
    for (auto& notice : sent_)
        if (!sent) static_cast<void>(notice.release());
}

int Fabric::local_index(int index) const {
    const std::vector<int>& own = members(host_of(index));
    return static_cast<int>(std::find(own.begin(), own.end(), index) - own.begin());
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

int Fabric::tag(Channel channel) const {
    const auto room = static_cast<std::uint64_t>(link_->tag_limit()) / 8;
    return static_cast<int>(id_ % room * 8) + channel;
}

std::shared_ptr<Fabric> Fabric::part(const std::vector<int>& members, std::uint64_t id) const {
    std::vector<int> hosts, addresses, seen;
    int own = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
        const int host = host_of(members[i]);
        auto found = std::find(seen.begin(), seen.end(), host);
        if (found == seen.end()) found = seen.insert(seen.end(), host);
        hosts.push_back(static_cast<int>(found - seen.begin()));
        addresses.push_back(address(members[i]));
        if (members[i] == index_) own = static_cast<int>(i);
    }
    if (seen.size() < 2) return nullptr;
    return std::make_shared<Fabric>(link_, std::move(hosts), std::move(addresses), own, id);
}

void Fabric::announce(const Notice& notice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sending_.erase(
        std::remove_if(sending_.begin(), sending_.end(), [&](Link::Transfer& one) { return link_->done(one); }),
        sending_.end());
    if (sending_.empty()) sent_.clear();
    sent_.push_back(std::make_unique<Notice>(notice));
    for (int i = 0; i < size(); ++i)
        if (host_of(i) != host())
            sending_.push_back(link_->send(address(i), tag(kNotice), sent_.back().get(), sizeof(Notice)));
}

void Fabric::announce_abort(const std::string& reason) {
    Notice notice{kAbort, host(), {}};
    std::strncpy(notice.reason, reason.c_str(), kReasonBytes - 1);
    announce(notice);
}

void Fabric::announce_departure(std::uint64_t last_sequence) {
    announce({static_cast<std::int64_t>(last_sequence), host(), {}});
}

void Fabric::read_notices(HostGroup& group) {
    int source = 0;
    std::size_t bytes = 0;
    // One thread at a time, or two would see the same message and the second wait for it for ever.
    const std::lock_guard<std::mutex> lock(mutex_);
    while (link_->probe(tag(kNotice), source, bytes)) {
        Notice notice{};
        Link::Transfer transfer = link_->receive(source, tag(kNotice), &notice, sizeof notice);
        while (!link_->done(transfer)) cpu_pause();  // it has come already
        if (notice.last_sequence == kAbort) {
            group.abort_from_afar(notice.reason);
        } else {
            left_at_[static_cast<std::size_t>(notice.host)] = notice.last_sequence;
        }
    }
}

std::vector<int> Fabric::departed(std::uint64_t sequence) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> gone;
    for (std::size_t host = 0; host < members_.size(); ++host)
        if (left_at_[host] != kAbort && static_cast<std::int64_t>(sequence) > left_at_[host])
            gone.insert(gone.end(), members_[host].begin(), members_[host].end());
    return gone;
}

}  // namespace ring
