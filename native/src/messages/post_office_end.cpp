// How waiting for a message ends otherwise: by a signal, a deadline, an abort, or a rank that is gone.
#include <utility>

#include "messages/letter.hpp"
#include "ring/base/errors.hpp"
#include "ring/base/text.hpp"
#include "ring/messages/post_office.hpp"

namespace ring {
namespace {

// A letter's memory is free when its receiver has taken it, or never will.
class Delivered : public Arena::Condition {
   public:
    Delivered(std::shared_ptr<Letter> letter, int receiver) : letter_(std::move(letter)), receiver_(receiver) {}
    bool holds(Domain& domain) noexcept override {
        return letter_->state.load(std::memory_order_seq_cst) != LetterState::Sent || domain.dead(receiver_);
    }

   private:
    std::shared_ptr<Letter> letter_;
    int receiver_;  // local rank
};

}  // namespace

int PostOffice::local(int member) const {
    if (!place_.fabric) return member;
    return place_.fabric->host_of(member) == place_.fabric->host() ? place_.fabric->local_index(member) : -1;
}

// Nobody rings for a rank of another host: it polls.
void PostOffice::ring_bell_of(int member) const {
    const int here = local(member);
    if (here >= 0) group_->ring_bell_of(here);
}

bool PostOffice::is_gone(int member) const {
    if (member == place_.index) return false;
    const int here = local(member);
    if (here >= 0) return group_->has_left(group_->local_rank(here)) || group_->domain().dead(group_->local_rank(here));
    const int address = place_.fabric->address(member);
    return place_.fabric->notices().has_left(address) || place_.epoch_fabric->notices().has_left(address);
}

std::string PostOffice::rank_of(int member) const {
    return "rank " + std::to_string(place_.ranks[static_cast<std::size_t>(member)]);
}

std::string PostOffice::describe(const Message& message) const {
    const bool sends = message.header_.kind == OpKind::Send;
    const int peer = message.source_ >= 0 ? message.source_ : message.peer_;
    return "rank " + std::to_string(group_->rank()) + ": " + to_string(message.header_.kind) +
           (sends ? " to " : " from ") + (peer == kAny ? "any rank" : rank_of(peer)) + " (tag " +
           std::to_string(message.tag_) + ")";
}

void PostOffice::wait(Message& message, double timeout, const Interruption& check) {
    const std::int64_t deadline = deadline_after(timeout);
    std::int64_t next_look = monotonic_ns() + kCheckEvery;
    try {
        wait_until(
            group_->bell(), polls() ? group_->spin().polling() : group_->spin(),
            [&] {
                if (message.done()) return true;
                advance();
                return message.done();
            },
            [&] {
                const std::int64_t now = monotonic_ns();
                if (polls() && now < next_look) return;
                next_look = now + kCheckEvery;
                if (check) check();
                look();
                if (is_past(deadline))
                    group_->abort(describe(message) + " was not done after " + seconds_text(timeout));
            },
            polls() ? kPoll : kSleep);
    } catch (...) {
        group_->abort(FixedText("rank %d was interrupted while it waited for a message", group_->rank()));
        advance();  // fails all that is under way, this one too
        throw;
    }
    message.get();
}

void PostOffice::look() noexcept {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || group_->aborted()) return;
    const auto examine = [&](const Message& message) {
        bool gone = message.peer_ != kAny && is_gone(message.peer_);
        if (message.peer_ == kAny) {
            gone = true;
            for (int member = 0; member < static_cast<int>(place_.ranks.size()); ++member)
                gone = gone && (member == place_.index || is_gone(member));
        }
        if (gone) {
            // It may have sent just before.
            if (link_ && link_->advance()) return;
            take_arrivals();
            if (match()) return;
            group_->abort(describe(message) + " waits in vain: " +
                          (message.peer_ == kAny ? "all other ranks have" : rank_of(message.peer_) + " has") +
                          " left (the cell or script ended) or died");
        } else if (is_past(message.deadline_)) {
            group_->abort(describe(message) + " timed out. Call send and receive in pairs, or raise the timeout.");
        }
    };
    try {
        for (const auto* queue : {&wanted_, &receiving_, &sending_})
            for (std::size_t i = 0; i < queue->size() && !group_->aborted(); ++i) {
                const auto message = (*queue)[i];
                if (!message->done()) examine(*message);
            }
    } catch (const std::exception& error) {
        group_->abort(error.what());
    }
}

// Nothing begins to read a tensor after an abort, and who reads one now ends soon: then they are their callers' again.
void PostOffice::fail_all(const std::exception_ptr& error) noexcept {
    group_->wait_quiet();
    if (link_) link_->drop_streams();
    for (auto* queue : {&wanted_, &receiving_, &sending_}) {
        for (const auto& message : *queue) {
            std::exception_ptr own = error;
            try {
                const std::string why = describe(*message) + " stopped because " + group_->abort_reason();
                const bool late = is_past(message->deadline_);
                if (!own) own = late ? std::make_exception_ptr(Timeout(why)) : std::make_exception_ptr(Aborted(why));
            } catch (...) {
                own = std::current_exception();
            }
            if (message->offset_ != kNowhere) give_up_letter(message->offset_, message->peer_);
            if (!message->done()) finish(*message, own);
        }
        queue->clear();
    }
}

void PostOffice::close(std::exception_ptr error) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_.empty() && receiving_.empty() && sending_.empty()) return;
    try {
        if (!error)
            error = std::make_exception_ptr(
                InvalidArgument("rank " + std::to_string(group_->rank()) + ": its communicator was closed"));
    } catch (...) {
        error = std::current_exception();
    }
    // Who has matched a letter of ours must not find other data in it.
    if (!sending_.empty() || !receiving_.empty())
        group_->abort(FixedText("rank %d left with messages under way", group_->rank()));
    fail_all(error);
}

void PostOffice::give_up_letter(std::uint64_t offset, int to) noexcept {
    Domain& domain = group_->domain();
    try {
        // After an abort nobody begins to read it, and who reads it now is soon done.
        if (group_->aborted()) {
            domain.keep(offset, group_->quiet());
        } else {
            domain.keep(offset, std::make_shared<Delivered>(domain.hold<Letter>(offset), group_->local_rank(to)));
        }
    } catch (...) {
        return;  // there is no memory to note it: the letter stays
    }
    domain.release(offset);
}

}  // namespace ring
