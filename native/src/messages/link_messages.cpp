#include "ring/messages/link_messages.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "messages/envelope.hpp"
#include "ring/base/errors.hpp"
#include "ring/base/wait.hpp"
#include "ring/group/header_damage.hpp"

namespace ring {
namespace {

constexpr std::int64_t kSendLimit = 100'000'000;  // ns
constexpr std::size_t kSegment = Window::kMostBytes;

std::uint64_t segments_of(std::size_t bytes) { return (bytes + kSegment - 1) / kSegment; }

std::size_t segment_bytes(std::size_t bytes, std::uint64_t segment) {
    return std::min(kSegment, bytes - segment * kSegment);
}

}  // namespace

LinkMessages::LinkMessages(std::shared_ptr<Fabric> fabric, std::shared_ptr<RingMemory> ring_memory)
    : fabric_(std::move(fabric)), ring_memory_(std::move(ring_memory)) {}

LinkMessages::~LinkMessages() {
    drop_streams();
    const std::int64_t deadline = monotonic_ns() + kSendLimit;
    for (look_at_outgoing(); !outgoing_.empty() && monotonic_ns() < deadline; look_at_outgoing()) cpu_yield();
    // The link may read these until the process ends.
    for (Outgoing& one : outgoing_) static_cast<void>(new std::shared_ptr<std::byte[]>(std::move(one.memory)));
    for (Incoming& one : incoming_) fabric_->link().cancel(one.transfer, one.memory);
}

std::shared_ptr<Stream> LinkMessages::send(int to, int tag, const void* data, std::uint64_t count, DType dtype) {
    MessageHead head;
    head.id = fabric_->id();
    head.number = ++last_number_;
    head.tag = tag;
    head.dtype = dtype;
    head.count = count;
    if (head.bytes() <= kSmallBytes && outgoing_.size() < kMostWaiting) {
        post(to, head, data, head.bytes());
        return nullptr;
    }
    head.kind = MessageHead::Kind::Large;
    auto stream = std::make_shared<Stream>();
    stream->head = head;
    stream->peer = to;
    stream->data = static_cast<std::byte*>(const_cast<void*>(data));
    announced_.emplace(head.number, stream);
    try {
        post(to, head, nullptr, 0);
    } catch (...) {
        announced_.erase(head.number);
        throw;
    }
    return stream;
}

void LinkMessages::post(int to, const MessageHead& head, const void* payload, std::size_t bytes) {
    const std::shared_ptr<std::byte[]> memory(new std::byte[sizeof(MessageHead) + bytes]);
    auto* const own = new (memory.get()) MessageHead(head);
    own->from = fabric_->index();
    if (bytes > 0) std::memcpy(memory.get() + sizeof(MessageHead), payload, bytes);
    outgoing_.push_back({memory, 0});
    try {
        outgoing_.back().transfer = fabric_->send(Fabric::kMessage, to, memory.get(), sizeof(MessageHead) + bytes);
    } catch (...) {
        outgoing_.pop_back();
        throw;
    }
    leaving_.store(outgoing_.size(), std::memory_order_seq_cst);
}

bool LinkMessages::advance() {
    bool moved = look_at_outgoing();
    moved |= read();
    moved |= move_all(sending_, *this);
    moved |= move_all(receiving_, *this);
    return moved;
}

bool LinkMessages::look_at_outgoing() {
    const std::size_t before = outgoing_.size();
    const auto has_left = [&](Outgoing& one) { return fabric_->link().done(one.transfer); };
    outgoing_.erase(std::remove_if(outgoing_.begin(), outgoing_.end(), has_left), outgoing_.end());
    leaving_.store(outgoing_.size(), std::memory_order_seq_cst);
    return outgoing_.size() != before;
}

// Messages of one rank are taken in the order in which it sent them.
bool LinkMessages::read() {
    int source = 0;
    std::size_t bytes = 0;
    while (fabric_->has_come(Fabric::kMessage, source, bytes)) {
        const std::shared_ptr<std::byte[]> memory(new std::byte[std::max(bytes, sizeof(MessageHead))]);
        incoming_.push_back({source, bytes, memory, 0});
        try {
            incoming_.back().transfer = fabric_->receive_come(Fabric::kMessage, source, memory.get(), bytes);
        } catch (...) {
            incoming_.pop_back();
            throw;
        }
    }
    bool any = false;
    std::vector<int> late;  // sources with a message that has not arrived entirely
    for (auto one = incoming_.begin(); one != incoming_.end();) {
        const bool waits = std::find(late.begin(), late.end(), one->source) != late.end();
        if (waits || !fabric_->link().done(one->transfer)) {
            late.push_back(one->source);
            ++one;
            continue;
        }
        handle(*one);
        one = incoming_.erase(one);
        any = true;
    }
    return any;
}

void LinkMessages::handle(const Incoming& come) {
    MessageHead head;
    if (come.bytes < sizeof head) return;
    std::memcpy(&head, come.memory.get(), sizeof head);
    if (head.id != fabric_->id()) return;  // of a generation that ended long ago
    check(head, come);
    if (head.kind == MessageHead::Kind::Small || head.kind == MessageHead::Kind::Large) {
        come_.push_back({head, come.memory});
        return;
    }
    const auto found = announced_.find(head.number);
    if (found != announced_.end() && found->second->peer != head.from)
        throw Error("the answer to a message came from a rank that is not its receiver");
    if (found == announced_.end()) {
        if (head.kind == MessageHead::Kind::Refused) refusals_.push_back(head);
        return;
    }
    const std::shared_ptr<Stream> stream = found->second;
    announced_.erase(found);
    if (head.kind == MessageHead::Kind::Refused) {
        stream->head = head;
        stream->state = Stream::State::Refused;
        return;
    }
    stream->staging.emplace(ring_memory_, Window::kInFlight * kSegment);
    stream->window.emplace(*fabric_, -1, stream->peer, 0, segments_of(stream->head.bytes()), Fabric::kPayload);
    stream->state = Stream::State::Moving;
    sending_.push_back(stream);
}

// Throws Error for a message that no rank sends.
void LinkMessages::check(const MessageHead& head, const Incoming& come) const {
    const bool is_kind = head.kind == MessageHead::Kind::Small || head.kind == MessageHead::Kind::Large ||
                         head.kind == MessageHead::Kind::Wanted || head.kind == MessageHead::Kind::Refused;
    const bool is_sender = head.from >= 0 && head.from < fabric_->size() && fabric_->address(head.from) == come.source;
    const bool is_size =
        is_known(head.dtype) && is_known(head.wanted_dtype) && head.count < kNoTensor / item_size(head.dtype);
    const std::size_t behind = come.bytes - sizeof head;
    if (!is_kind || !is_sender || !is_size || behind != (head.kind == MessageHead::Kind::Small ? head.bytes() : 0))
        throw Error(
            "received an invalid message: the memory of its sender is damaged, or it has another version; "
            "restart all ranks with one version");
}

bool LinkMessages::take(RemoteMessage& message) {
    if (come_.empty()) return false;
    message = std::move(come_.front());
    come_.pop_front();
    return true;
}

bool LinkMessages::take_refusal(MessageHead& head) {
    if (refusals_.empty()) return false;
    head = refusals_.front();
    refusals_.pop_front();
    return true;
}

std::shared_ptr<Stream> LinkMessages::accept(const MessageHead& head, void* data) {
    auto stream = std::make_shared<Stream>();
    stream->head = head;
    stream->peer = head.from;
    stream->data = static_cast<std::byte*>(data);
    stream->window.emplace(*fabric_, head.from, -1, segments_of(head.bytes()), 0, Fabric::kPayload);
    stream->state = Stream::State::Moving;
    receiving_.push_back(stream);
    MessageHead answer = head;
    answer.kind = MessageHead::Kind::Wanted;
    post(head.from, answer, nullptr, 0);
    return stream;
}

void LinkMessages::refuse(MessageHead head, DType wanted_dtype, std::uint64_t wanted_count) {
    head.kind = MessageHead::Kind::Refused;
    head.wanted_dtype = wanted_dtype;
    head.wanted_count = wanted_count;
    post(head.from, head, nullptr, 0);
}

void LinkMessages::drop_streams() noexcept {
    for (auto* streams : {&sending_, &receiving_}) {
        for (const auto& stream : *streams) stream->window.reset();
        streams->clear();
    }
    announced_.clear();
}

// One stream to, or from, each rank at a time.
bool LinkMessages::move_all(std::deque<std::shared_ptr<Stream>>& streams, const LinkMessages& self) {
    bool moved = false;
    std::vector<int> busy;  // peers
    for (auto one = streams.begin(); one != streams.end();) {
        Stream& stream = **one;
        if (std::find(busy.begin(), busy.end(), stream.peer) == busy.end()) {
            moved |= self.move(stream);
            if (stream.state == Stream::State::Done) {
                one = streams.erase(one);
                continue;
            }
            busy.push_back(stream.peer);
        }
        ++one;
    }
    return moved;
}

bool LinkMessages::move(Stream& stream) const {
    Window& window = *stream.window;
    const std::size_t bytes = stream.head.bytes();
    const auto size = [&](std::uint64_t segment) { return segment_bytes(bytes, segment); };
    bool moved = false;
    if (stream.staging) {
        for (; window.may_send(); moved = true) {
            const std::uint64_t segment = window.started();
            auto* const place =
                static_cast<std::byte*>(stream.staging->data()) + segment % Window::kInFlight * kSegment;
            std::memcpy(place, stream.data + segment * kSegment, size(segment));
            window.send(place, size(segment));
        }
        moved |= window.look_at_sends();
    } else {
        for (window.ask(size); window.has_come(); window.ask(size), moved = true) {
            std::memcpy(stream.data + window.taken() * kSegment, window.landing(window.taken()), size(window.taken()));
            window.take();
        }
    }
    if (window.done()) {
        stream.window.reset();
        stream.state = Stream::State::Done;
    }
    return moved;
}

}  // namespace ring
