// Envelopes: sent, matched, and received.
#include "ring/messages/point_to_point.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "messages/envelope.hpp"
#include "ring/base/errors.hpp"
#include "ring/base/text.hpp"
#include "ring/group/header_damage.hpp"

namespace ring {
namespace {

constexpr std::size_t kPart = std::size_t{16} << 20;  // bytes copied between two checks for an abort
constexpr const char* kSameOnBoth = "; send and receive tensors of one size and dtype";

// Sets the name of a message in timelines, after "send" or "receive".
void set_title(Header& header, int rank, int tag) noexcept {
    const char* way = header.kind == OpKind::Send ? "to" : "from";
    if (rank < 0) {
        std::snprintf(header.name, kNameBytes, "%s any rank, tag %d", way, tag);
    } else {
        std::snprintf(header.name, kNameBytes, "%s rank %d, tag %d", way, rank, tag);
    }
}

std::string elements(std::uint64_t count, DType dtype) {
    return std::to_string(count) + " elements of " + to_string(dtype);
}

}  // namespace

PointToPoint::PointToPoint(Place place)
    : place_(std::move(place)),
      link_(place_.fabric ? std::make_unique<LinkMessages>(place_.fabric, group_->shared_ring_memory()) : nullptr) {}

PointToPoint::~PointToPoint() {
    if (!group_->ring_memory().owned()) {
        static_cast<void>(link_.release());  // its link belongs to the parent process
        return;
    }
    close(nullptr);
    for (const Posted& one : posted_) give_up_envelope(one.offset, one.to);
}

std::shared_ptr<Message> PointToPoint::make(OpKind kind, int peer, int tag, void* data, std::uint64_t count,
                                            DType dtype, double timeout, bool attended) {
    auto message = std::make_shared<Message>();
    message->attended_ = attended;
    message->peer_ = peer;
    message->tag_ = tag;
    message->data_ = static_cast<std::byte*>(data);
    message->bytes_ = count * item_size(dtype);
    message->deadline_ = deadline_after(timeout);
    recorder_->begin_phase(message->times_);
    message->header_.kind = kind;
    message->header_.dtype = dtype;
    message->header_.count = count;
    return message;
}

std::shared_ptr<Message> PointToPoint::send(int to, int tag, const void* data, std::uint64_t count, DType dtype,
                                            double timeout, bool attended) {
    auto message = make(OpKind::Send, to, tag, const_cast<void*>(data), count, dtype, timeout, attended);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        check_open(*message);
        const bool is_remote = local(to) < 0;
        sending_.push_back(message);
        try {
            if (is_remote) {
                message->stream_ = link_->send(to, tag, data, count, dtype);
            } else {
                post(*message);
            }
        } catch (...) {
            sending_.pop_back();
            throw;
        }
        begin(*message);
        const bool is_copied =
            is_remote ? !message->stream_ : message->bytes_ <= kSmallBytes && posted_.size() < kMostWaiting;
        if (is_copied) {
            sending_.pop_back();
            if (!is_remote) posted_.push_back({message->offset_, to});
            finish(*message, nullptr);
        }
    }
    ring_bell_of(to);
    return message;
}

std::shared_ptr<Message> PointToPoint::receive(int from, int tag, void* data, std::uint64_t count, DType dtype,
                                               double timeout, bool attended) {
    auto message = make(OpKind::Receive, from, tag, data, count, dtype, timeout, attended);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        check_open(*message);
        wanted_.push_back(message);
        begin(*message);
    }
    advance();
    return message;
}

// Throws where an earlier message was refused, and after an abort.
void PointToPoint::check_open(const Message& message) {
    reap();
    if (late_) std::rethrow_exception(std::exchange(late_, nullptr));
    if (group_->aborted()) throw Aborted(describe(message) + " stopped because " + group_->abort_reason());
}

void PointToPoint::begin(const Message& message) {
    ++pending_;
    if (!message.attended_) ++unattended_;
}

// Writes the envelope and appends it to the receiver's mailbox.
void PointToPoint::post(Message& message) {
    RingMemory& ring_memory = group_->ring_memory();
    const bool is_small = message.bytes_ <= kSmallBytes;
    const std::uint64_t tensor = is_small ? kNowhere : ring_memory.offset_of(message.data_, message.bytes_);
    const std::size_t behind = is_small ? message.bytes_ : tensor == kNowhere ? kWindowBytes : 0;
    message.offset_ = ring_memory.allocate(sizeof(Envelope) + behind);
    auto* envelope = new (ring_memory.at(message.offset_)) Envelope();
    envelope->from = place_.index;
    envelope->tag = message.tag_;
    envelope->dtype = message.header_.dtype;
    envelope->count = message.header_.count;
    if (is_small) {
        envelope->data = message.offset_ + sizeof(Envelope);
        if (message.bytes_ > 0) std::memcpy(envelope->behind(), message.data_, message.bytes_);
    } else if (tensor != kNowhere) {
        envelope->data = tensor;
    }
    message.envelope_ = envelope;
    if (envelope->data == kNowhere) fill(message);
    SharedAtomic<std::uint64_t>& envelopes = group_->envelopes(local(message.peer_));
    envelope->next = envelopes.load(std::memory_order_relaxed);
    while (!envelopes.compare_exchange_weak(envelope->next, message.offset_, std::memory_order_seq_cst)) {
    }
}

bool PointToPoint::advance() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.load(std::memory_order_relaxed) == 0 && !(link_ && link_->is_sending())) return false;
    if (!group_->aborted()) {
        try {
            return advance_locked();
        } catch (const Aborted&) {  // during a copy
        } catch (const std::exception& error) {
            group_->abort("rank " + std::to_string(group_->rank()) + " stopped in messages: " + error.what());
        }
    }
    fail_all(nullptr);
    return true;
}

bool PointToPoint::advance_locked() {
    bool moved = link_ && link_->advance();
    take_arrivals();
    moved |= match();
    for (auto* queue : {&receiving_, &sending_})
        for (std::size_t i = 0; i < queue->size();) {
            const auto message = (*queue)[i];
            moved |= message->stream_ ? settle(*message) : queue == &sending_ ? hand_over(*message) : empty(*message);
            if (message->done()) {
                queue->erase(queue->begin() + static_cast<std::ptrdiff_t>(i));
            } else {
                ++i;
            }
        }
    return moved;
}

// Sender: writes what fits into the envelope, and ends when its receiver has taken or refused it.
bool PointToPoint::hand_over(Message& message) {
    Envelope& envelope = *message.envelope_;
    const bool moved = fill(message);
    const EnvelopeState state = envelope.state.load(std::memory_order_seq_cst);
    if (state == EnvelopeState::Sent) return moved;
    std::exception_ptr error;
    if (state == EnvelopeState::Refused) error = refused(message, envelope.wanted_count, envelope.wanted_dtype);
    group_->ring_memory().release(std::exchange(message.offset_, kNowhere));
    finish(message, error);
    return true;
}

// Completes a message between hosts whose stream has ended.
bool PointToPoint::settle(Message& message) {
    const Stream& stream = *message.stream_;
    if (stream.state == Stream::State::Done) {
        finish(message, nullptr);
    } else if (stream.state == Stream::State::Refused) {
        finish(message, refused(message, stream.head.wanted_count, stream.head.wanted_dtype));
    } else {
        return false;
    }
    return true;
}

void PointToPoint::accept(Message& message, Arrival& arrival) {
    message.source_ = arrival.from;
    message.came_ = monotonic_ns();
    message.envelope_ = arrival.envelope;
    if (recorder_->on()) set_title(message.header_, place_.ranks[static_cast<std::size_t>(arrival.from)], message.tag_);
    recorder_->end_phase(message.times_, Phase::Waiting, message.header_, place_.number,
                         place_.ranks[static_cast<std::size_t>(arrival.from)]);
    if (arrival.count != message.header_.count || arrival.dtype != message.header_.dtype) {
        refuse(message, arrival);
        return;
    }
    if (arrival.envelope == nullptr) {
        if (arrival.remote.head.kind == MessageHead::Kind::Large) {
            message.stream_ = link_->accept(arrival.remote.head, message.data_);
            return;
        }
        if (message.bytes_ > 0) std::memcpy(message.data_, arrival.remote.payload(), message.bytes_);
        finish(message, nullptr);
        return;
    }
    Envelope& envelope = *arrival.envelope;
    const std::uint64_t place = envelope.data;
    if (place == kNowhere) {
        empty(message);
        return;
    }
    if (!group_->ring_memory().contains(place, message.bytes_))
        throw Error(rank_of(message.source_) + " sent a tensor beyond ring memory: its memory is damaged");
    {
        const HostGroup::Moving moving(*group_, &Mailbox::reading);
        const std::byte* from = group_->ring_memory().at<std::byte>(place);
        for (std::size_t at = 0; at < message.bytes_; at += kPart) {
            if (group_->aborted()) throw Aborted(group_->abort_reason());
            std::memcpy(message.data_ + at, from + at, std::min(kPart, message.bytes_ - at));
        }
    }
    envelope.state.store(EnvelopeState::Taken, std::memory_order_seq_cst);
    ring_bell_of(message.source_);
    finish(message, nullptr);
}

void PointToPoint::refuse(Message& message, Arrival& arrival) {
    const Header& wanted = message.header_;
    if (arrival.envelope == nullptr) {
        link_->refuse(arrival.remote.head, wanted.dtype, wanted.count);
    } else {
        arrival.envelope->wanted_count = wanted.count;
        arrival.envelope->wanted_dtype = wanted.dtype;
        arrival.envelope->state.store(EnvelopeState::Refused, std::memory_order_seq_cst);
        ring_bell_of(message.source_);
    }
    finish(message,
           std::make_exception_ptr(Mismatch(describe(message) + ": expected " + elements(wanted.count, wanted.dtype) +
                                            ", got " + elements(arrival.count, arrival.dtype) + kSameOnBoth)));
}

std::exception_ptr PointToPoint::refused(const Message& message, std::uint64_t count, DType dtype) const {
    return std::make_exception_ptr(Mismatch(describe(message) + ": " + rank_of(message.peer_) + " expected " +
                                            elements(count, dtype) + kSameOnBoth));
}

// Sender: writes the next part of a stream into the window.
bool PointToPoint::fill(Message& message) {
    Envelope& envelope = *message.envelope_;
    if (envelope.data != kNowhere) return false;
    bool moved = false;
    while (message.moved_ < message.bytes_) {
        const std::size_t there = message.moved_ - envelope.emptied.load(std::memory_order_seq_cst);
        if (there > kWindowBytes)
            throw Error(rank_of(message.peer_) + " read more than was sent to it: its memory is damaged");
        const std::size_t room = kWindowBytes - there;
        const std::size_t at = message.moved_ % kWindowBytes;
        const std::size_t part = std::min({room, kWindowBytes - at, message.bytes_ - message.moved_, kStepBytes});
        if (part == 0) break;
        std::memcpy(envelope.behind() + at, message.data_ + message.moved_, part);
        message.moved_ += part;
        envelope.filled.store(message.moved_, std::memory_order_seq_cst);
        ring_bell_of(message.peer_);
        moved = true;
    }
    return moved;
}

// Receiver: reads the content of the window.
bool PointToPoint::empty(Message& message) {
    Envelope& envelope = *message.envelope_;
    bool moved = false;
    const HostGroup::Moving moving(*group_, &Mailbox::reading);
    for (;;) {
        const std::size_t there = envelope.filled.load(std::memory_order_seq_cst) - message.moved_;
        if (there > std::min(kWindowBytes, message.bytes_ - message.moved_))
            throw Error(rank_of(message.source_) + " sent more than it announced: its memory is damaged");
        const std::size_t at = message.moved_ % kWindowBytes;
        const std::size_t part = std::min({there, kWindowBytes - at, kStepBytes});
        if (part == 0) break;
        std::memcpy(message.data_ + message.moved_, envelope.behind() + at, part);
        message.moved_ += part;
        envelope.emptied.store(message.moved_, std::memory_order_seq_cst);
        ring_bell_of(message.source_);
        moved = true;
    }
    if (message.moved_ == message.bytes_) {
        envelope.state.store(EnvelopeState::Taken, std::memory_order_seq_cst);
        ring_bell_of(message.source_);
        finish(message, nullptr);
    }
    return moved;
}

void PointToPoint::finish(Message& message, std::exception_ptr error) noexcept {
    if (message.came_ == 0) message.came_ = monotonic_ns();
    if (recorder_->on() && message.header_.name[0] == '\0')  // a send, or a receive that was never matched
        set_title(message.header_, message.peer_ < 0 ? -1 : place_.ranks[static_cast<std::size_t>(message.peer_)],
                  message.tag_);
    recorder_->end_phase(message.times_, Phase::Moving, message.header_, place_.number);
    place_.standstill->forget(&message);
    message.error_ = std::move(error);
    --pending_;
    if (!message.attended_) --unattended_;
    message.state_.store(message.error_ ? Message::State::Failed : Message::State::Done, std::memory_order_seq_cst);
    group_->bell().ring();  // another thread may wait for it
}

// Frees small envelopes that were received, oldest first; notes small messages that were refused.
void PointToPoint::reap() {
    const auto note = [&](std::uint64_t count, DType dtype, int tag, int by, std::uint64_t wanted, DType as) {
        late_ = std::make_exception_ptr(Mismatch("rank " + std::to_string(group_->rank()) + ": send to " + rank_of(by) +
                                                 " (tag " + std::to_string(tag) + "), an earlier one: expected " +
                                                 elements(wanted, as) + " there, got " + elements(count, dtype) +
                                                 kSameOnBoth));
    };
    if (link_ && !group_->aborted()) {
        link_->advance();
        for (MessageHead head; link_->take_refusal(head);)
            note(head.count, head.dtype, head.tag, head.from, head.wanted_count, head.wanted_dtype);
    }
    while (!posted_.empty()) {
        auto* envelope = group_->ring_memory().at<Envelope>(posted_.front().offset);
        const EnvelopeState state = envelope->state.load(std::memory_order_seq_cst);
        if (state == EnvelopeState::Sent) return;
        if (state == EnvelopeState::Refused)
            note(envelope->count, envelope->dtype, envelope->tag, posted_.front().to, envelope->wanted_count,
                 envelope->wanted_dtype);
        group_->ring_memory().release(posted_.front().offset);
        posted_.pop_front();
    }
}

namespace {

// An envelope's memory is free when its receiver has received it, or never will.
class Delivered : public Arena::Condition {
   public:
    Delivered(std::shared_ptr<Envelope> envelope, int receiver) : envelope_(std::move(envelope)), receiver_(receiver) {}
    bool holds(RingMemory& ring_memory) noexcept override {
        return envelope_->state.load(std::memory_order_seq_cst) != EnvelopeState::Sent || ring_memory.dead(receiver_);
    }

   private:
    std::shared_ptr<Envelope> envelope_;
    int receiver_;  // local rank
};

}  // namespace

int PointToPoint::local(int member) const {
    if (!place_.fabric) return member;
    return place_.fabric->host_of(member) == place_.fabric->host() ? place_.fabric->local_index(member) : -1;
}

// A rank of another host polls, so it needs no bell.
void PointToPoint::ring_bell_of(int member) const {
    const int here = local(member);
    if (here >= 0) group_->ring_bell_of(here);
}

bool PointToPoint::is_gone(int member) const {
    if (member == place_.index) return false;
    const int here = local(member);
    if (here >= 0)
        return group_->has_left(group_->local_rank(here)) || group_->ring_memory().dead(group_->local_rank(here));
    const int address = place_.fabric->address(member);
    return place_.fabric->notices().has_left(address) || place_.generation_fabric->notices().has_left(address);
}

std::string PointToPoint::rank_of(int member) const {
    return "rank " + std::to_string(place_.ranks[static_cast<std::size_t>(member)]);
}

FixedText PointToPoint::interrupted(const Message& message) const noexcept {
    const bool sends = message.header_.kind == OpKind::Send;
    const int peer = message.source_ >= 0 ? message.source_ : message.peer_;
    char whom[32] = "any rank";
    if (peer != kAny) std::snprintf(whom, sizeof whom, "rank %d", place_.ranks[static_cast<std::size_t>(peer)]);
    return FixedText("rank %d was interrupted while it waited for %s %s %s (tag %d)", group_->rank(),
                     to_string(message.header_.kind), sends ? "to" : "from", whom, message.tag_);
}

std::string PointToPoint::describe(const Message& message) const {
    return "rank " + std::to_string(group_->rank()) + ": " + describe_call(message);
}

std::string PointToPoint::describe_call(const Message& message) const {
    const bool sends = message.header_.kind == OpKind::Send;
    const int peer = message.source_ >= 0 ? message.source_ : message.peer_;
    return std::string(to_string(message.header_.kind)) + (sends ? " to " : " from ") +
           (peer == kAny ? "any rank" : rank_of(peer)) + " (tag " + std::to_string(message.tag_) + ")";
}

void PointToPoint::wait(Message& message, double timeout, const Interruption& check) {
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
        group_->abort(interrupted(message));
        advance();  // fails all messages under way, this one too
        throw;
    }
    message.get();
}

// Whether the other side has done its part, but `advance` has not seen it yet.
bool PointToPoint::has_ended(const Message& message) {
    if (message.stream_)
        return message.stream_->state == Stream::State::Done || message.stream_->state == Stream::State::Refused;
    const bool is_sent = message.envelope_ != nullptr && message.header_.kind == OpKind::Send;
    return is_sent && message.envelope_->state.load(std::memory_order_seq_cst) != EnvelopeState::Sent;
}

// For a message that the other side has not begun to receive, or has not sent.
void PointToPoint::report_wait(const Message& message) const {
    const bool receives = message.header_.kind == OpKind::Receive;
    const bool lacks_call = receives          ? message.source_ < 0
                            : message.stream_ ? message.stream_->state == Stream::State::Announced
                                              : message.envelope_->emptied.load(std::memory_order_seq_cst) == 0;
    if (lacks_call) {
        place_.standstill->awaits(&message, 0, 1, describe_call(message));
    } else {
        place_.standstill->moves(&message);
    }
}

void PointToPoint::look() noexcept {
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
            // It may have sent or received just before it left.
            if (link_ && link_->advance()) return;
            if (has_ended(message)) return;
            take_arrivals();
            if (match()) return;
            group_->abort(describe(message) + " cannot complete: " +
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
                if (!message->done()) report_wait(*message);
            }
    } catch (const std::exception& error) {
        group_->abort(error.what());
    }
}

// After an abort no rank begins to read a tensor, and one that reads now ends soon: then the tensors belong to their
// callers again.
void PointToPoint::fail_all(const std::exception_ptr& error) noexcept {
    group_->wait_quiet();
    if (link_) link_->drop_streams();
    for (auto* queue : {&wanted_, &receiving_, &sending_}) {
        for (const auto& message : *queue) {
            std::exception_ptr own = error;
            try {
                const std::string why = describe(*message) + " stopped because " + group_->abort_reason();
                const bool late = is_past(message->deadline_);
                if (!own && group_->aborted_by_mismatch()) own = std::make_exception_ptr(Mismatch(why));
                if (!own) own = late ? std::make_exception_ptr(Timeout(why)) : std::make_exception_ptr(Aborted(why));
            } catch (...) {
                own = std::current_exception();
            }
            if (message->offset_ != kNowhere) give_up_envelope(message->offset_, message->peer_);
            if (!message->done()) finish(*message, own);
        }
        queue->clear();
    }
}

void PointToPoint::close(std::exception_ptr error) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_.empty() && receiving_.empty() && sending_.empty()) return;
    try {
        if (!error)
            error = std::make_exception_ptr(
                InvalidArgument("rank " + std::to_string(group_->rank()) + ": its communicator was closed"));
    } catch (...) {
        error = std::current_exception();
    }
    // A receiver that has matched an envelope of ours must not find other data in it.
    if (!sending_.empty() || !receiving_.empty())
        group_->abort(FixedText("rank %d left with messages under way", group_->rank()));
    fail_all(error);
}

void PointToPoint::give_up_envelope(std::uint64_t offset, int to) noexcept {
    RingMemory& ring_memory = group_->ring_memory();
    try {
        // After an abort no rank begins to read it, and one that reads it now is soon done.
        if (group_->aborted()) {
            ring_memory.keep(offset, group_->quiet());
        } else {
            ring_memory.keep(offset,
                             std::make_shared<Delivered>(ring_memory.hold<Envelope>(offset), group_->local_rank(to)));
        }
    } catch (...) {
        return;  // no memory to note it: the envelope is never freed
    }
    ring_memory.release(offset);
}

namespace {

// More envelopes than a mailbox can ever hold, because each takes memory of its sender.
constexpr std::size_t kMostEnvelopes = std::size_t{1} << 20;

Error damaged(const std::string& what) {
    return Error("another rank of this host wrote invalid data (" + what +
                 "): its memory is damaged; restart all ranks");
}

}  // namespace

// Messages to this rank are read from the mailbox and the link, and matched with its receives.

// Another process wrote both the offset and the envelope, so both are checked.
Envelope* PointToPoint::envelope_at(std::uint64_t offset) const {
    const RingMemory& ring_memory = group_->ring_memory();
    if (offset % alignof(Envelope) != 0 || !ring_memory.contains(offset, sizeof(Envelope)))
        throw damaged("a message beyond ring memory");
    auto* const envelope = ring_memory.at<Envelope>(offset);
    if (envelope->from < 0 || envelope->from >= static_cast<int>(place_.ranks.size()) || local(envelope->from) < 0)
        throw damaged("a message of member " + std::to_string(envelope->from));
    if (!is_known(envelope->dtype) || envelope->count >= kNoTensor / item_size(envelope->dtype))
        throw damaged("a message of " + std::to_string(envelope->count) + " elements of " + to_string(envelope->dtype));
    return envelope;
}

// Takes the messages that have arrived since, oldest first.
void PointToPoint::take_arrivals() {
    if (link_)
        for (RemoteMessage remote; link_->take(remote);) {
            const MessageHead& head = remote.head;
            arrived_.push_back({head.from, head.tag, head.dtype, head.count, nullptr, std::move(remote)});
        }
    SharedAtomic<std::uint64_t>& envelopes = group_->envelopes(group_->index());
    if (envelopes.load(std::memory_order_seq_cst) == kNowhere) return;
    std::uint64_t newest = envelopes.exchange(kNowhere, std::memory_order_seq_cst);
    const auto before = static_cast<std::ptrdiff_t>(arrived_.size());
    while (newest != kNowhere) {
        Envelope* const envelope = envelope_at(newest);
        if (arrived_.size() - static_cast<std::size_t>(before) > kMostEnvelopes)
            throw damaged("an endless list of messages");
        arrived_.push_back({envelope->from, envelope->tag, envelope->dtype, envelope->count, envelope, {}});
        newest = envelope->next;
    }
    std::reverse(arrived_.begin() + before, arrived_.end());
}

bool PointToPoint::match() {
    bool moved = false;
    for (std::size_t i = 0; i < wanted_.size();) {
        const auto message = wanted_[i];
        const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrival& arrival) {
            return arrival.tag == message->tag_ && (message->peer_ == kAny || message->peer_ == arrival.from);
        });
        if (found == arrived_.end()) {
            ++i;
            continue;
        }
        Arrival arrival = std::move(*found);
        arrived_.erase(found);
        wanted_.erase(wanted_.begin() + static_cast<std::ptrdiff_t>(i));
        receiving_.push_back(message);  // so that an abort finds it
        accept(*message, arrival);
        if (message->done()) receiving_.pop_back();
        moved = true;
    }
    return moved;
}

}  // namespace ring
