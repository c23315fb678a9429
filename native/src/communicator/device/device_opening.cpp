#include "communicator/device/device_opening.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ring/base/text.hpp"

namespace ring {
namespace {

constexpr std::size_t kTerms = 256;
// ns between two exchanges of cards while ranks wait for NCCL: connecting takes milliseconds or seconds.
constexpr std::int64_t kShortestPause = 1'000'000, kLongestPause = 50'000'000;

// The term of rank `index` in the known sum; all are integers, and their sum is exact.
float term(int index, std::size_t i) { return static_cast<float>((index + 1) * static_cast<int>(i % 17 + 1)); }
float known_sum(int size, std::size_t i) {
    return static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i % 17 + 1);
}

}  // namespace

DeviceOpening::DeviceOpening(Communicator& owner, DeviceSide& side, const Work& asks)
    : owner_(owner), side_(side), asks_(asks) {
    try {
        write_card();
    } catch (const DeviceError& error) {
        refuse(error.what());
    }
    show_card();
}

void DeviceOpening::write_card() {
    DeviceStream& stream = side_.stream();
    Devices& devices = stream.devices();
    card_.insists = devices.settings().choice == DeviceChoice::Nccl ? 1 : 0;
    card_.shares = devices.settings().shares ? 1 : 0;
    gethostname(card_.host, sizeof card_.host - 1);
    if (devices.settings().choice == DeviceChoice::Host) throw DeviceError("RING_DEVICE=host");
    const std::shared_ptr<DeviceContext> context = stream.context();
    if (!context) throw DeviceError("it has joined and used no device before");
    card_.index = context->index();
    card_.device = context->uuid();
    if (!devices.settings().refusal.empty()) throw DeviceError(devices.settings().refusal);
    const std::shared_ptr<const Nccl> nccl = devices.nccl();
    nccl->check(nccl->ncclGetVersion(&card_.nccl), "ncclGetVersion", nullptr);
    kept_ = devices.take({owner_.ranks(), owner_.named_ == nullptr});
    if (!kept_) return make_id();
    stream.adopt(kept_);
    card_.kept = kept_->id();
}

// Only where ranks will connect: NCCL listens for them from now on.
void DeviceOpening::make_id() {
    if (owner_.index() != 0) return;
    const std::shared_ptr<const Nccl> nccl = side_.stream().devices().nccl();
    nccl->check(nccl->ncclGetUniqueId(&card_.id), "ncclGetUniqueId", nullptr);
}

void DeviceOpening::drop_kept() {
    if (kept_) side_.stream().drop(std::exchange(kept_, nullptr));
    card_.kept = {};
}

void DeviceOpening::show_card() {
    Request request;
    request.kind = OpKind::Allgather;
    request.dtype = DType::UInt8;
    request.pieces = {{reinterpret_cast<const std::byte*>(&card_), nullptr, sizeof card_}};
    request.shape = {static_cast<std::int64_t>(sizeof card_)};
    request.name = "devices";
    meeting_ = owner_.prepare(std::move(request), 0);
    owner_.queue_.push_front(meeting_);
}

std::string DeviceOpening::read_cards() {
    const std::shared_ptr<Work> meeting = std::move(meeting_);
    meeting->get();
    cards_.resize(static_cast<std::size_t>(owner_.size()));
    std::memcpy(cards_.data(), meeting->result.data.get(), cards_.size() * sizeof(DeviceCard));
    for (const DeviceCard& card : cards_) insists_ |= card.insists != 0;
    return why_not_nccl(cards_, owner_.ranks());
}

void DeviceOpening::refuse(const std::string& why) {
    if (card_.refuses == 0) card_.refuse(why);
    card_.waits = 0;
}

Communicator::Served DeviceOpening::advance() {
    using Served = Communicator::Served;
    owner_.group_->check_members();
    if (stage_ == Stage::Dropping) {
        DeviceStream& stream = side_.stream();
        if (reaper_->over()) return conclude(why_);
        if (!is_past(deadline_)) return Served::Polling;
        stream.abandon();
        throw DeviceError(why_ + ", and it could not be aborted");
    }
    if (meeting_) {
        const std::string why = read_cards();
        if (!why.empty()) return give_up(why);
        if (std::none_of(cards_.begin(), cards_.end(), [](const DeviceCard& card) { return card.waits != 0; }))
            return go_on();
    }
    if (card_.waits != 0 && look()) card_.waits = 0;
    const std::int64_t now = monotonic_ns();
    if (card_.waits != 0 && now < next_meeting_) return Served::Polling;
    pause_ = std::clamp(pause_ * 2, kShortestPause, kLongestPause);
    next_meeting_ = now + pause_;
    show_card();
    return Served::Moved;
}

// All ranks have completed the stage.
Communicator::Served DeviceOpening::go_on() {
    const bool connects = stage_ == Stage::Cards;
    if (stage_ == Stage::Summing) return conclude("");
    if (connects && have_kept_one(cards_)) {
        side_.reuse(std::move(kept_));
        return conclude("");
    }
    const bool has_id = !is_zero(cards_.front().id);
    if (connects) drop_kept();
    if (connects && !has_id) {  // the first rank has kept a communicator, but some other has not
        try {
            make_id();
        } catch (const DeviceError& error) {
            refuse(error.what());
        }
        return Communicator::Served::Moved;  // the ranks exchange cards again
    }
    stage_ = connects ? Stage::Connecting : Stage::Summing;
    card_.waits = 1;
    pause_ = 0;
    try {
        if (connects) {
            connect();
        } else {
            begin_sum();
        }
    } catch (const DeviceError& error) {
        refuse(error.what());
    }
    return Communicator::Served::Moved;
}

void DeviceOpening::connect() {
    deadline_ = deadline_after(side_.stream().devices().settings().connect_limit);
    side_.connect(cards_.front().id, {owner_.ranks(), owner_.named_ == nullptr}, owner_.index());
}

bool DeviceOpening::look() {
    const bool connects = stage_ == Stage::Connecting;
    try {
        if (connects ? side_.nccl()->ready() : look_at_sum()) return true;
        if (!is_past(deadline_)) return false;
        throw DeviceError((connects ? "NCCL has not connected in " : "a sum by NCCL was not done in ") +
                          seconds_text(side_.stream().devices().settings().connect_limit));
    } catch (const DeviceError& error) {
        refuse(error.what());
    }
    return true;
}

// An ordinary operation, and the first one on NCCL, which connects only then. So it leaves the queue as soon as it is
// issued, and the ranks can exchange further cards.
void DeviceOpening::begin_sum() {
    DeviceStream& stream = side_.stream();
    const std::shared_ptr<DeviceContext> context = stream.context();
    values_.resize(kTerms);
    for (std::size_t i = 0; i < kTerms; ++i) values_[i] = term(owner_.index(), i);
    const std::size_t bytes = kTerms * sizeof(float);
    terms_ = std::make_shared<DeviceMemory>(context, bytes, stream.copies(), stream.copies());
    context->copy_to_device(terms_->data(), values_.data(), bytes, stream.copies());
    Request request;
    request.kind = OpKind::Allreduce;
    request.dtype = DType::Float32;
    request.device = Device::Cuda;
    request.device_index = context->index();
    request.stream = stream.copies();
    request.pieces = {{terms_->data(), terms_->data(), kTerms}};
    request.shape = {static_cast<std::int64_t>(kTerms)};
    request.name = "check of NCCL";
    sum_ = owner_.prepare(std::move(request), 0);
    sum_->origin = Work::Origin::Check;
    side_.prepare(*sum_);
    sum_->device->own = terms_;
    owner_.queue_.push_front(sum_);
}

// True when the sum is done and correct. Throws DeviceError.
bool DeviceOpening::look_at_sum() {
    if (copied_) return copied_->passed() && read_sum();
    if (!sum_->launched()) {
        const HostGroup::Moving moving(*owner_.group_);
        if (sum_->machine.algorithm->advance(sum_->machine.gates) == Step::Done) owner_.end(*sum_);
    }
    sum_->get();
    if (!sum_->done()) {
        side_.nccl()->ready();
        return false;
    }
    DeviceStream& stream = side_.stream();
    const std::shared_ptr<DeviceContext> context = stream.context();
    context->copy_to_host(values_.data(), terms_->data(), kTerms * sizeof(float), stream.copies());
    copied_ = context->event_on(stream.copies());
    return false;
}

bool DeviceOpening::read_sum() {
    for (std::size_t i = 0; i < kTerms; ++i)
        if (values_[i] != known_sum(owner_.size(), i))
            throw DeviceError("NCCL gives wrong sums: " + std::to_string(values_[i]) + " instead of " +
                              std::to_string(known_sum(owner_.size(), i)));
    return true;
}

std::shared_ptr<DeviceWork> DeviceOpening::unfinished_launch() const {
    const bool launches = sum_ && !sum_->launched() && sum_->device->issued;
    return launches ? sum_->device : nullptr;
}

// Some rank has refused. Waits until the kernels of the sum have ended: they use this object's memory.
Communicator::Served DeviceOpening::give_up(const std::string& why) {
    drop_kept();
    if (!sum_) return conclude(why);
    if (!sum_->launched()) owner_.fail(*sum_, std::make_exception_ptr(DeviceError(why)));
    reaper_ = side_.disconnect();
    why_ = why;
    deadline_ = deadline_after(side_.stream().devices().settings().abort_limit);
    stage_ = Stage::Dropping;
    return Communicator::Served::Moved;
}

Communicator::Served DeviceOpening::conclude(const std::string& why) {
    if (why.empty()) {
        side_.conclude(DeviceSide::Way::Nccl, "");
    } else {
        side_.disconnect();
        side_.conclude(insists_ ? DeviceSide::Way::Error : DeviceSide::Way::Host, why);
    }
    return Communicator::Served::Done;
}

}  // namespace ring
