#include "agreement.hpp"

#include <cstring>

#include "algorithm_parts.hpp"

namespace ring {
namespace {

constexpr std::uint64_t kNoPayload = ~std::uint64_t{0};

bool is_reduction(const Header& header) {
    return header.kind == OpKind::Allreduce || header.kind == OpKind::ReduceScatter;
}

std::size_t bytes_of(const Header& header) { return header.count * item_size(header.dtype); }

}  // namespace

std::uint64_t* landing_places(const HostGroup& group) { return reinterpret_cast<std::uint64_t*>(group.extra()); }

std::size_t extra_bytes(const Fabric& fabric) {
    return static_cast<std::size_t>(fabric.size()) * sizeof(std::uint64_t) + fabric.shared_bytes();
}

Agreement::Agreement(HostGroup& group, Fabric& fabric, std::uint64_t sequence)
    : group_(group), fabric_(fabric), sequence_(sequence), transfers_(fabric.link(), fabric.tag(Fabric::kAgreement)) {}

std::byte* Agreement::message(int host) const {
    return group_.extra() + static_cast<std::size_t>(fabric_.size()) * sizeof(std::uint64_t) +
           static_cast<std::size_t>(host) * fabric_.message_bytes();
}

std::size_t Agreement::payload_offset(int host) const {
    const std::size_t local = fabric_.members(host).size();
    return sizeof(std::uint64_t) +
           local * (sizeof(Header) + static_cast<std::size_t>(fabric_.size()) * sizeof(std::int64_t));
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
        std::uint64_t payload = 0;
        std::memcpy(&payload, message(fabric_.host()), sizeof payload);
        const std::size_t bytes = payload_offset(fabric_.host()) + (payload == kNoPayload ? 0 : payload);
        for (int host = 0; host < fabric_.hosts(); ++host) {
            if (host == fabric_.host()) continue;
            const int leader = fabric_.address(fabric_.members(host).front());
            transfers_.receive(leader, message(host), fabric_.message_bytes());
            transfers_.send(leader, message(fabric_.host()), bytes);
        }
    }
    return transfers_.done() ? Step::Gate : Step::Stuck;
}

void Agreement::write_own() {
    const std::vector<Header> headers = group_.headers(sequence_);
    std::byte* at = message(fabric_.host());
    std::memcpy(at + sizeof(std::uint64_t), headers.data(), headers.size() * sizeof(Header));
    std::byte* splits = at + sizeof(std::uint64_t) + headers.size() * sizeof(Header);
    const auto all = static_cast<std::size_t>(fabric_.size()) * sizeof(std::int64_t);
    for (int i = 0; i < group_.size(); ++i)
        std::memcpy(splits + static_cast<std::size_t>(i) * all, group_.splits(i, sequence_), all);

    std::byte* out = at + payload_offset(fabric_.host());
    std::uint64_t payload = kNoPayload;
    if (all_inline(headers) && find_mismatch(headers, group_.ranks()).empty()) {
        const Header& lead = lead_header(headers);
        payload = 0;
        if (is_reduction(lead)) {
            const Reduction reduction(headers, lead, static_cast<std::size_t>(fabric_.size()), Share::OneHost);
            void* dst = out;
            reduction.run(&dst, 1, lead.count, [&](int member) { return group_.inline_slot(member, sequence_); });
            payload = bytes_of(lead);
        } else {
            for (int i = 0; i < group_.size(); ++i) {
                const std::size_t bytes = bytes_of(headers[static_cast<std::size_t>(i)]);
                std::memcpy(out + payload, group_.inline_slot(i, sequence_), bytes);
                payload += bytes;
            }
        }
    }
    std::memcpy(at, &payload, sizeof payload);
}

void Agreement::read_all() {
    headers_.resize(static_cast<std::size_t>(fabric_.size()));
    for (int host = 0; host < fabric_.hosts(); ++host) {
        const std::byte* at = message(host);
        std::uint64_t payload = 0;
        std::memcpy(&payload, at, sizeof payload);
        if (payload == kNoPayload) all_small_ = false;
        at += sizeof payload;
        for (int member : fabric_.members(host)) {
            std::memcpy(&headers_[static_cast<std::size_t>(member)], at, sizeof(Header));
            at += sizeof(Header);
        }
    }
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
        if (member == index) break;
        at += bytes_of(headers_[static_cast<std::size_t>(member)]);
    }
    return at;
}

const std::int64_t* Agreement::splits(int index) const {
    const int host = fabric_.host_of(index);
    const std::size_t row =
        fabric_.members(host).size() * sizeof(Header) +
        static_cast<std::size_t>(fabric_.local_index(index) * fabric_.size()) * sizeof(std::int64_t);
    return reinterpret_cast<const std::int64_t*>(message(host) + sizeof(std::uint64_t) + row);
}

}  // namespace ring
