// Messages of a communicator: group indices to those of this host, and the thread that carries on unattended ones.
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr std::int64_t kLookEvery = 50'000'000;  // ns

}  // namespace

int Communicator::neighbour(OpKind kind, int member) const {
    Request request;
    request.kind = kind;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!domain()->owned()) throw invalid(request, "a forked process cannot use its parent's communicator");
        check_open(request);
    }
    if (kind == OpKind::Receive && member == PostOffice::kAny && !fabric_) return member;
    if (member < 0 || member >= size())
        throw invalid(request, "rank " + std::to_string(member) + " is not in this group of " + std::to_string(size()));
    if (!fabric_) return member;
    if (fabric_->host_of(member) != fabric_->host())
        throw Unsupported(who() + ": " + to_string(kind) + ": rank " +
                          std::to_string(ranks()[static_cast<std::size_t>(member)]) +
                          " is on another host, and messages travel within a host; use a collective, or a group of "
                          "another backend");
    return fabric_->local_index(member);
}

std::shared_ptr<Message> Communicator::send(int to, int tag, const void* data, std::uint64_t count, DType dtype,
                                            double timeout, bool attended) {
    const int member = neighbour(OpKind::Send, to);
    if (!attended) epoch_.progress->begin();
    auto message = post_->send(member, tag, data, count, dtype, timeout, attended);
    if (!attended && !message->done()) epoch_.progress->nudge();
    return message;
}

std::shared_ptr<Message> Communicator::receive(int from, int tag, void* data, std::uint64_t count, DType dtype,
                                               double timeout, bool attended) {
    const int member = neighbour(OpKind::Receive, from);
    if (!attended) epoch_.progress->begin();
    auto message = post_->receive(member, tag, data, count, dtype, timeout, attended);
    if (!attended && !message->done()) epoch_.progress->nudge();
    return message;
}

int Communicator::source(const Message& message) const {
    const int member = message.source();
    return !fabric_ || member < 0 ? member : fabric_->members(fabric_->host())[static_cast<std::size_t>(member)];
}

Communicator::Served Communicator::serve_messages() {
    if (!post_ || !post_->unattended()) return Served::Idle;
    if (post_->advance()) return Served::Moved;
    const std::int64_t now = monotonic_ns();
    if (now >= next_look_) {
        next_look_ = now + kLookEvery;
        post_->look();
    }
    return Served::Blocked;
}

}  // namespace ring
