#include "collectives/inter_host/header_exchange.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/host/algorithm_parts.hpp"
#include "ring/base/text.hpp"
#include "ring/collectives/inter_host/link_model.hpp"
#include "ring/group/header_damage.hpp"
#include "ring/group/mismatch.hpp"

namespace ring {
namespace {

constexpr std::uint64_t kNoPayload = ~std::uint64_t{0};
constexpr int kLooks = 8;

// Whether one header is enough for another host. For a join each rank's header differs.
bool are_alike(const std::vector<Header>& headers) {
    const Header& first = headers.front();
    if (first.kind == OpKind::Join) return false;
    return std::all_of(headers.begin(), headers.end(), [&](const Header& one) {
        return std::memcmp(&one, &first, kHeaderLine) == 0;  // which holds a digest of shape and name
    });
}

std::size_t bytes_of(const Header& header) { return header.count * item_size(header.dtype); }

}  // namespace

std::uint64_t* landing_places(const HostGroup& group) { return reinterpret_cast<std::uint64_t*>(group.extra()); }

std::size_t extra_bytes(const Fabric& fabric) {
    return static_cast<std::size_t>(fabric.size()) * sizeof(std::uint64_t) + fabric.shared_bytes();
}

// Messages are received into the group's block, which is not freed while the group lives.
Agreement::Agreement(std::shared_ptr<HostGroup> group, const Fabric& fabric, const std::vector<int>& ranks,
                     std::uint64_t sequence)
    : group_(*group),
      fabric_(fabric),
      ranks_(ranks),
      sequence_(sequence),
      transfers_(fabric, Fabric::kAgreement, std::move(group)),
      rounds_(agree_directly(static_cast<std::uint64_t>(fabric.hosts()))
                  ? std::vector<Round>{}
                  : dissemination_plan(fabric.hosts(), fabric.host())) {}

std::byte* Agreement::message(int host) const {
    return group_.extra() + static_cast<std::size_t>(fabric_.size()) * sizeof(std::uint64_t) +
           static_cast<std::size_t>(host) * fabric_.message_bytes();
}

MessageFront Agreement::front(int host) const {
    MessageFront front;
    std::memcpy(&front, message(host), sizeof front);
    return front;
}

std::size_t Agreement::payload_offset(int host) const {
    const MessageFront front = this->front(host);
    return sizeof front + front.headers * sizeof(Header) + front.splits;
}

Step Agreement::advance(std::uint64_t gates) {
    if (gates == 1) {
        read_all();
        return Step::Done;
    }
    if (group_.index() != 0) return Step::Gate;
    if (!started_) {
        started_ = true;
        write_own();
        if (rounds_.empty()) send_to_each();
    }
    // Polls a few times before its thread yields the core, which takes as long as a poll.
    for (int looks = group_.spin().yield ? 1 : kLooks; looks > 0; --looks)
        if (pass_on() && transfers_.done()) return Step::Gate;
    return Step::AwaitsLink;
}

std::vector<int> Agreement::awaited_hosts() {
    std::vector<int> hosts;
    if (rounds_.empty())
        for (int member : transfers_.awaited()) hosts.push_back(fabric_.host_of(member));
    else if (arriving_ && !arriving_->awaited().empty())
        for (int i = 0; i < rounds_[round_].blocks; ++i) hosts.push_back((rounds_[round_].from + i) % fabric_.hosts());
    return hosts;
}

void Agreement::send_to_each() {
    for (int host = 0; host < fabric_.hosts(); ++host) {
        if (host == fabric_.host()) continue;
        const int leader = fabric_.members(host).front();
        transfers_.receive(leader, message(host), fabric_.message_bytes());
        transfers_.send(leader, message(fabric_.host()), block_bytes(fabric_.host()));
    }
}

bool Agreement::pass_on() {
    for (; round_ < rounds_.size(); ++round_) {
        const Round& round = rounds_[round_];
        if (!arriving_) begin_round(round);
        if (!arriving_->done()) return false;
        std::uint64_t behind = 0;
        std::memcpy(&behind, landing_->data(), sizeof behind);
        if (!has_length_ && packed_messages(behind) > 1) {
            has_length_ = true;
            const auto most = static_cast<std::uint64_t>(round.blocks) * (sizeof(BlockRun) + fabric_.message_bytes());
            if (behind > most)
                throw_damaged(ranks_[static_cast<std::size_t>(fabric_.members(round.from).front())],
                              "headers and payloads of " + std::to_string(behind) + " bytes");
            auto whole = std::make_shared<std::vector<std::byte>>(sizeof behind + behind);
            std::copy(landing_->begin(), landing_->end(), whole->begin());
            landing_ = std::move(whole);
            arriving_.emplace(fabric_, Fabric::kAgreement, landing_);
            arriving_->receive(fabric_.members(round.from).front(), landing_->data() + kFirstPart,
                               landing_->size() - kFirstPart);
            if (!arriving_->done()) return false;
        }
        arriving_.reset();
        unpack(round.from, round.blocks, landing_->data() + sizeof behind, behind);
    }
    return true;
}

void Agreement::begin_round(const Round& round) {
    has_length_ = false;
    landing_ = std::make_shared<std::vector<std::byte>>(kFirstPart);
    arriving_.emplace(fabric_, Fabric::kAgreement, landing_);
    arriving_->receive(fabric_.members(round.from).front(), landing_->data(), kFirstPart);

    struct Run {
        int host;
        BlockRun run;
    };
    std::vector<Run> runs;
    std::uint64_t behind = 0;
    for (int i = 0; i < round.blocks; ++i) {
        const int host = (fabric_.host() + i) % fabric_.hosts();
        const std::size_t bytes = block_bytes(host);
        if (!runs.empty() && runs.back().run.bytes == bytes &&
            std::memcmp(message(runs.back().host), message(host), bytes) == 0) {
            ++runs.back().run.hosts;
            continue;
        }
        runs.push_back({host, {1, bytes}});
        behind += sizeof(BlockRun) + bytes;
    }
    Region& packed = packed_.emplace_back(group_.shared_ring_memory(), sizeof behind + behind);
    auto* out = static_cast<std::byte*>(packed.data());
    std::memcpy(out, &behind, sizeof behind);
    out += sizeof behind;
    for (const Run& one : runs) {
        std::memcpy(out, &one.run, sizeof one.run);
        std::memcpy(out + sizeof one.run, message(one.host), one.run.bytes);
        out += sizeof one.run + one.run.bytes;
    }
    const std::size_t first = std::min(kFirstPart, sizeof behind + behind);
    const int to = fabric_.members(round.to).front();
    transfers_.send(to, packed.data(), first);
    transfers_.send(to, static_cast<std::byte*>(packed.data()) + first, sizeof behind + behind - first);
}

void Agreement::unpack(int first, int hosts, const std::byte* data, std::size_t bytes) {
    const auto check = [&](bool is_right) {
        if (!is_right)
            throw_damaged(ranks_[static_cast<std::size_t>(fabric_.members(first).front())],
                          "headers of hosts that are cut short or too long");
    };
    int taken = 0;
    while (taken < hosts) {
        BlockRun run{};
        check(bytes >= sizeof run);
        std::memcpy(&run, data, sizeof run);
        bytes -= sizeof run;
        check(run.hosts > 0 && run.hosts <= static_cast<std::uint64_t>(hosts - taken) && run.bytes <= bytes &&
              run.bytes >= sizeof(MessageFront) && run.bytes <= fabric_.message_bytes());
        for (std::uint64_t i = 0; i < run.hosts; ++i, ++taken) {
            const int host = (first + taken) % fabric_.hosts();
            std::memcpy(message(host), data + sizeof run, run.bytes);
            check(block_bytes(host) == run.bytes);
        }
        data += sizeof run + run.bytes;
        bytes -= run.bytes;
    }
    check(bytes == 0);
}

std::size_t Agreement::block_bytes(int host) const {
    const std::uint64_t payload = front(host).payload;
    return payload_offset(host) + (payload == kNoPayload ? 0 : payload);
}

void Agreement::write_own() {
    const std::vector<Header> headers = group_.headers(sequence_);
    check_headers(headers, group_.ranks(), group_.inline_bytes());
    MessageFront front{fabric_.id(),         sequence_, are_alike(headers) ? 1 : headers.size(), 0, kNoPayload,
                       group_.inline_bytes()};
    std::byte* out = message(fabric_.host()) + sizeof front;
    for (std::size_t i = 0; i < front.headers; ++i) {
        Header sent = headers[i];
        sent.input = sent.output = kNowhere;  // offsets in ring memory mean nothing on another host
        std::memcpy(out + i * sizeof sent, &sent, sizeof sent);
    }
    out += front.headers * sizeof(Header);
    if (std::any_of(headers.begin(), headers.end(), [](const Header& one) { return one.kind == OpKind::Alltoall; })) {
        for (int i = 0; i < group_.size(); ++i, front.splits += row_bytes())
            std::memcpy(out + front.splits, group_.splits(i, sequence_), row_bytes());
        out += front.splits;
    }

    std::uint64_t& payload = front.payload;
    if (all_inline(headers) && find_mismatch(headers, group_.ranks()).empty()) {
        const Header& lead = lead_header(headers);
        payload = 0;
        if (reduces(lead.kind)) {
            const Reduction reduction(headers, lead, static_cast<std::size_t>(fabric_.size()), Share::OneHost);
            void* dst = out;
            reduction.run(&dst, 1, lead.count, [&](int member) { return group_.inline_slot(member, sequence_); });
            payload = bytes_of(lead);
        } else {
            for (int i = 0; i < group_.size(); ++i) {
                const auto at = static_cast<std::size_t>(i);
                if (lead.kind == OpKind::Broadcast && group_.ranks()[at] != lead.root) continue;
                const std::size_t bytes = bytes_of(headers[at]);
                std::memcpy(out + payload, group_.inline_slot(i, sequence_), bytes);
                payload += bytes;
            }
        }
    }
    std::memcpy(message(fabric_.host()), &front, sizeof front);
}

void Agreement::read_all() {
    headers_.resize(static_cast<std::size_t>(fabric_.size()));
    const std::vector<Header> here = group_.headers(sequence_);
    for (int host = 0; host < fabric_.hosts(); ++host) {
        const MessageFront front = this->front(host);
        if (front.id != fabric_.id() || front.sequence != sequence_)
            throw Error("host " + std::to_string(host) +
                        " sent a message of another group or operation (its sequence is " +
                        std::to_string(front.sequence) + ")");
        if (front.most != group_.inline_bytes())
            throw InvalidArgument("RING_INLINE allows " + std::to_string(group_.inline_bytes()) +
                                  " bytes on this host, and " + std::to_string(front.most) + " on the host of rank " +
                                  std::to_string(fabric_.members(host).front()) +
                                  "; set it to the same value on every host");
        const std::vector<int>& members = fabric_.members(host);
        if (front.headers != 1 && front.headers != members.size())
            throw_damaged(ranks_[static_cast<std::size_t>(members.front())],
                          std::to_string(front.headers) + " headers of " + std::to_string(members.size()) + " ranks");
        if (front.payload == kNoPayload) all_small_ = false;
        for (std::size_t i = 0; i < members.size(); ++i) {
            Header& header = headers_[static_cast<std::size_t>(members[i])];
            if (host == fabric_.host()) {
                header = here[i];
            } else {
                const std::size_t told = std::min<std::size_t>(i, front.headers - 1);
                std::memcpy(&header, message(host) + sizeof front + told * sizeof header, sizeof header);
            }
        }
        check_message(host, front);
    }
}

// The data behind a host's headers must be as long as they say, or a reader would read beyond the message.
void Agreement::check_message(int host, const MessageFront& front) const {
    const std::vector<int>& members = fabric_.members(host);
    std::vector<Header> headers;
    for (int member : members) headers.push_back(headers_[static_cast<std::size_t>(member)]);
    const std::vector<int> ranks = ranks_of(ranks_, members);
    check_headers(headers, ranks, group_.inline_bytes());
    const Header& lead = lead_header(headers);
    std::uint64_t payload = reduces(lead.kind) ? bytes_of(lead) : 0, splits = 0;
    for (std::size_t i = 0; i < headers.size(); ++i) {
        const bool brings = lead.kind != OpKind::Broadcast || ranks[i] == lead.root;
        if (!reduces(lead.kind) && brings) payload += bytes_of(headers[i]);
        if (headers[i].kind == OpKind::Alltoall) splits = members.size() * row_bytes();
    }
    if (front.splits != splits || (front.payload != kNoPayload && front.payload != payload))
        throw_damaged(ranks.front(), "a message of " + std::to_string(front.splits) + " and " +
                                         std::to_string(front.payload) + " bytes behind its headers");
    for (std::size_t i = 0; i < headers.size(); ++i)
        if (headers[i].kind == OpKind::Alltoall && !adds_up(this->splits(members[i]), fabric_.size(), headers[i].count))
            throw_damaged(ranks[i], "splits that are not those of its tensor");
}

const std::byte* Agreement::partial(int host) const {
    for (int member : fabric_.members(host))
        if (headers_[static_cast<std::size_t>(member)].kind != OpKind::Join)
            return message(host) + payload_offset(host);
    return nullptr;
}

const std::byte* Agreement::payload(int index) const {
    const int host = fabric_.host_of(index);
    const std::byte* at = message(host) + payload_offset(host);
    for (int member : fabric_.members(host)) {
        const Header& header = headers_[static_cast<std::size_t>(member)];
        if (member == index || header.kind == OpKind::Broadcast) break;  // a broadcast has only the root's payload
        at += bytes_of(header);
    }
    return at;
}

const std::int64_t* Agreement::splits(int index) const {
    const int host = fabric_.host_of(index);
    const std::size_t row =
        front(host).headers * sizeof(Header) +
        static_cast<std::size_t>(fabric_.local_index(index) * fabric_.size()) * sizeof(std::int64_t);
    return reinterpret_cast<const std::int64_t*>(message(host) + sizeof(MessageFront) + row);
}

}  // namespace ring
