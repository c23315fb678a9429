// Messages of a communicator: what it checks before, the thread that carries on unattended ones, and other hosts'
// aborts.
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
void Communicator::check_member(OpKind kind, int member) const {
    Request request;
    request.kind = kind;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!domain()->owned()) throw invalid(request, "a forked process cannot use its parent's communicator");
        check_open(request);
    }
    if (kind == OpKind::Receive && member == PostOffice::kAny) return;
    if (member < 0 || member >= size())
        throw invalid(request, "rank " + std::to_string(member) + " is not in this group of " + std::to_string(size()));
}

std::shared_ptr<Message> Communicator::send(int to, int tag, const void* data, std::uint64_t count, DType dtype,
                                            double timeout, bool attended) {
    check_member(OpKind::Send, to);
    if (!attended || post_->polls()) epoch_.progress->begin();
    auto message = post_->send(to, tag, data, count, dtype, timeout, attended);
    if (post_->unattended()) epoch_.progress->nudge();
    return message;
}

std::shared_ptr<Message> Communicator::receive(int from, int tag, void* data, std::uint64_t count, DType dtype,
                                               double timeout, bool attended) {
    check_member(OpKind::Receive, from);
    if (!attended || post_->polls()) epoch_.progress->begin();
    auto message = post_->receive(from, tag, data, count, dtype, timeout, attended);
    if (post_->unattended()) epoch_.progress->nudge();
    return message;
}

void Communicator::wait(Message& message, double timeout, const Interruption& check) {
    try {
        post_->wait(message, timeout, [&] {
            read_notices();
            if (check) check();
        });
    } catch (...) {
        announce_abort();
        throw;
    }
}

// Of aborts and departures on other hosts.
void Communicator::read_notices() {
    if (epoch_.fabric) epoch_.fabric->notices().read(*epoch_.group);
    if (fabric_ && fabric_ != epoch_.fabric) fabric_->notices().read(*group_);
}

Communicator::Served Communicator::serve_messages() {
    if (!post_ || !post_->unattended()) return Served::Idle;
    if (post_->advance()) return Served::Moved;
    const std::int64_t now = monotonic_ns();
    if (now >= next_look_) {
        next_look_ = now + kCheckEvery;
        try {
            read_notices();
        } catch (const std::exception& error) {
            group_->abort(error.what());
        }
        post_->look();
        announce_abort();
    }
    return post_->polls() ? Served::Polling : Served::Blocked;
}

}  // namespace ring
