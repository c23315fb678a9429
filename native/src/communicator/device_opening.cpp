#include "communicator/device_opening.hpp"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "ring/base/text.hpp"
#include "ring/communicator/device_side.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
namespace {

constexpr std::size_t kTerms = 256;

// What rank `index` adds to the known sum; all are whole, and their sum is exact.
float term(int index, std::size_t i) { return static_cast<float>((index + 1) * static_cast<int>(i % 17 + 1)); }
float known_sum(int size, std::size_t i) {
    return static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i % 17 + 1);
}

}  // namespace

DeviceOpening::DeviceOpening(Communicator& owner, DeviceGroup& group, const Work& asks)
    : owner_(owner), group_(group), asks_(asks) {
    Devices& devices = group_.stream().devices();
    card_.insists = devices.settings().choice == DeviceChoice::Nccl ? 1 : 0;
    gethostname(card_.host, sizeof card_.host - 1);
    const std::shared_ptr<DeviceContext> context = group_.stream().context();
    try {
        if (devices.settings().choice == DeviceChoice::Host) throw DeviceError("RING_DEVICE=host");
        if (!context) throw DeviceError("it has joined and used no device before");
        card_.index = context->index();
        card_.device = context->uuid();
        const std::shared_ptr<const Nccl> nccl = devices.nccl();
        nccl->check(nccl->ncclGetVersion(&card_.nccl), "ncclGetVersion", nullptr);
        if (owner_.index() == 0) nccl->check(nccl->ncclGetUniqueId(&card_.id), "ncclGetUniqueId", nullptr);
    } catch (const DeviceError& error) {
        card_.refuse(error.what());
    }
    ask(Stage::Cards);
}

void DeviceOpening::ask(Stage stage) {
    stage_ = stage;
    Request request;
    request.kind = OpKind::Allgather;
    request.dtype = DType::UInt8;
    request.pieces = {{reinterpret_cast<const std::byte*>(&card_), nullptr, sizeof card_}};
    request.shape = {static_cast<std::int64_t>(sizeof card_)};
    request.name = "devices";
    meeting_ = owner_.prepare(std::move(request), 0);
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    owner_.queue_.push_front(meeting_);
}

// What the ranks have said: why there can be no NCCL, or nothing.
std::string DeviceOpening::answer() {
    meeting_->get();
    cards_.resize(static_cast<std::size_t>(owner_.size()));
    std::memcpy(cards_.data(), meeting_->result().data.get(), cards_.size() * sizeof(DeviceCard));
    for (const DeviceCard& card : cards_) insists_ |= card.insists != 0;
    return why_not_nccl(cards_, owner_.ranks());
}

void DeviceOpening::refuse(const std::string& why) {
    if (card_.refuses == 0) card_.refuse(why);
}

// True when NCCL is ready, or the rank has refused it.
bool DeviceOpening::wait_for_nccl() {
    try {
        if (card_.refuses != 0 || group_.nccl()->ready()) return true;
        if (monotonic_ns() > deadline_)
            throw DeviceError("NCCL has not connected in " +
                              seconds_text(group_.stream().devices().settings().connect_limit));
    } catch (const DeviceError& error) {
        refuse(error.what());
        return true;
    }
    return false;
}

// An ordinary operation, in its turn: the first of NCCL, which connects only then.
void DeviceOpening::begin_sum() {
    DeviceStream& stream = group_.stream();
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
    sum_->is_trial_ = true;
    owner_.device_->prepare(*sum_);
    stage_ = Stage::Summing;
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    owner_.queue_.push_front(sum_);
}

void DeviceOpening::read_sum() {
    for (std::size_t i = 0; i < kTerms; ++i)
        if (values_[i] != known_sum(owner_.size(), i))
            return refuse("NCCL gives wrong sums: " + std::to_string(values_[i]) + " instead of " +
                          std::to_string(known_sum(owner_.size(), i)));
}

Communicator::Served DeviceOpening::conclude(const std::string& why) {
    if (why.empty()) {
        group_.conclude(DeviceGroup::Way::Nccl, "");
    } else {
        group_.disconnect();
        group_.conclude(insists_ ? DeviceGroup::Way::Error : DeviceGroup::Way::Host, why);
    }
    return Communicator::Served::Done;
}

Communicator::Served DeviceOpening::advance() {
    using Served = Communicator::Served;
    owner_.group_->check_members();
    DeviceStream& stream = group_.stream();
    switch (stage_) {
        case Stage::Cards: {
            const std::string why = answer();
            if (!why.empty()) return conclude(why);
            deadline_ = deadline_after(stream.devices().settings().connect_limit);
            try {
                group_.connect(cards_.front().id, owner_.size(), owner_.index());
            } catch (const DeviceError& error) {
                refuse(error.what());
            }
            stage_ = Stage::Connecting;
            return Served::Moved;
        }
        case Stage::Connecting:
            if (!wait_for_nccl()) return Served::Polling;
            ask(Stage::Connected);
            return Served::Moved;
        case Stage::Connected: {
            const std::string why = answer();
            if (!why.empty()) return conclude(why);
            begin_sum();
            return Served::Moved;
        }
        case Stage::Summing:
            try {
                sum_->get();
                if (!sum_->done() && wait_for_nccl() && card_.refuses == 0) {
                    if (monotonic_ns() <= deadline_) return Served::Polling;
                    throw DeviceError("a sum by NCCL was not done in " +
                                      seconds_text(stream.devices().settings().connect_limit));
                }
                if (sum_->done() && card_.refuses == 0) {
                    const std::shared_ptr<DeviceContext> context = stream.context();
                    context->copy_to_host(values_.data(), terms_->data(), kTerms * sizeof(float), stream.copies());
                    copied_ = context->event_on(stream.copies());
                    stage_ = Stage::Copying;
                    return Served::Moved;
                }
            } catch (const DeviceError& error) {
                refuse(error.what());
            }
            if (card_.refuses == 0) return Served::Polling;
            reaper_ = group_.disconnect();
            deadline_ = deadline_after(stream.devices().settings().abort_limit);
            stage_ = Stage::Dropping;
            return Served::Moved;
        case Stage::Copying:
            if (!copied_->passed()) return Served::Polling;
            read_sum();
            ask(Stage::Checked);
            return Served::Moved;
        case Stage::Dropping:
            if (!reaper_->over()) {
                if (monotonic_ns() <= deadline_) return Served::Polling;
                stream.abandon();
                throw DeviceError(card_.reason + std::string(", and it could not be aborted"));
            }
            ask(Stage::Checked);
            return Served::Moved;
        case Stage::Checked:
            return conclude(answer());
    }
    return Served::Idle;
}

}  // namespace ring
