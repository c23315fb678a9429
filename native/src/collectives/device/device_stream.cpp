#include "ring/collectives/device/device_stream.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ring/base/errors.hpp"
#include "ring/base/text.hpp"
#include "ring/base/wait.hpp"

namespace ring {
namespace {

constexpr std::chrono::milliseconds kPause{1};
constexpr std::size_t kLeastPinned = std::size_t{64} << 10;
constexpr std::size_t kKeptPinned = std::size_t{512} << 20;  // blocks beyond that end when the next one is taken

bool is_free(const std::shared_ptr<PinnedRegion>& block) { return block.use_count() == 1; }

bool works(const std::shared_ptr<NcclCommunicator>& communicator) {
    try {
        return communicator->ready();
    } catch (const DeviceError&) {
        return false;
    }
}

void give_up_failed(Devices& devices, const std::shared_ptr<DeviceContext>& context, const DeviceError& error) {
    if (!error.lasts) return;
    devices.give_up("device " + std::to_string(context ? context->index() : 0) + " of this rank has failed (" +
                    error.what() +
                    "), in a kernel before this operation or beside it; restart this engine, which alone makes the "
                    "device work again, and run the cell with CUDA_LAUNCH_BLOCKING=1 to see which kernel it is");
}

}  // namespace

void LaunchOrder::enter(HostGroup& group, std::uint64_t gate, std::uint64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    erase(group);
    candidates_.push_back({&group, gate, id});
}

void LaunchOrder::leave(const HostGroup& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    erase(group);
}

void LaunchOrder::erase(const HostGroup& group) {
    candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(),
                                     [&](const Candidate& one) { return one.group == &group; }),
                      candidates_.end());
}

bool LaunchOrder::is_next(HostGroup& group) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto own =
        std::find_if(candidates_.begin(), candidates_.end(), [&](const Candidate& one) { return one.group == &group; });
    if (own == candidates_.end()) return false;
    const Ticket ticket = group.tickets().look(own->gate);
    if (ticket.state != Ticket::State::Taken) return false;
    group.tickets().pass(ticket.number);  // first, so that the tickets that the other groups take now come later
    return std::none_of(candidates_.begin(), candidates_.end(), [&](const Candidate& one) {
        if (one.group == &group) return false;
        const Ticket other = one.group->tickets().look(one.gate);
        if (other.state == Ticket::State::Later) return false;
        // Tickets that span hosts may have equal numbers.
        return other.state == Ticket::State::Soon ||
               std::make_pair(other.number, one.id) < std::make_pair(ticket.number, own->id);
    });
}

DeviceStream::~DeviceStream() {
    if (!owner_.is_this_process()) return;
    if (!reaper_ && !communicators_.empty()) {
        const auto broken = std::stable_partition(communicators_.begin(), communicators_.end(), works);
        if (broken != communicators_.end()) Reaper::begin({broken, communicators_.end()}, Reaper::Way::Abort);
        communicators_.erase(broken, communicators_.end());
        devices_->keep(std::move(communicators_));
    }
    while (kernels() == Kernels::Ending) std::this_thread::sleep_for(kPause);
    if (kernels() == Kernels::Hang) return;
    for (void* stream : {stream_, copies_})
        if (stream != nullptr) context_->destroy_stream(stream);
}

std::shared_ptr<DeviceContext> DeviceStream::use(int index) {
    const std::string given_up = devices_->given_up();
    if (!given_up.empty()) throw InvalidArgument(given_up);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!context_) context_ = devices_->context(index);
    if (context_->index() != index)
        throw InvalidArgument("a rank uses one device, and this one has used device " +
                              std::to_string(context_->index()) + " before, not " + std::to_string(index) +
                              "; move the tensor there, and call torch.cuda.set_device before the first operation");
    return context_;
}

std::shared_ptr<DeviceContext> DeviceStream::context() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return context_;
}

void* DeviceStream::handle() {
    if (stream_ == nullptr) stream_ = context()->make_stream();
    return stream_;
}

void* DeviceStream::copies() {
    if (copies_ == nullptr) copies_ = context()->make_stream();
    return copies_;
}

std::shared_ptr<PinnedRegion> DeviceStream::pinned(const std::shared_ptr<RingMemory>& ring_memory, std::size_t bytes) {
    std::shared_ptr<PinnedRegion> taken;
    std::size_t kept = 0;
    for (const auto& block : pinned_) {
        kept += block->bytes();
        if (is_free(block) && block->bytes() >= bytes && (!taken || block->bytes() < taken->bytes())) taken = block;
    }
    const auto drop = [&](const std::shared_ptr<PinnedRegion>& block) {
        if (kept <= kKeptPinned || !is_free(block)) return false;
        kept -= block->bytes();
        return true;
    };
    kept += taken ? 0 : bytes;
    pinned_.erase(std::remove_if(pinned_.begin(), pinned_.end(), drop), pinned_.end());
    if (!taken) {
        const std::size_t rounded = round_up(std::max(bytes, kLeastPinned), kLeastPinned);
        pinned_.push_back(taken = std::make_shared<PinnedRegion>(context(), ring_memory, rounded));
    }
    return taken;
}

bool DeviceStream::claim(const void* owner) {
    const void* nobody = nullptr;
    return launching_.compare_exchange_strong(nobody, owner) || nobody == owner;
}

void DeviceStream::release(const void* owner) { launching_.compare_exchange_strong(owner, nullptr); }

void DeviceStream::adopt(std::shared_ptr<NcclCommunicator> communicator) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reaper_) {  // the generation has ended meanwhile, so this communicator is ended alone
        Reaper::begin({std::move(communicator)}, Reaper::Way::Abort);
        throw Aborted("the devices' generation has ended");
    }
    communicators_.push_back(std::move(communicator));
}

std::shared_ptr<const Reaper> DeviceStream::drop(const std::shared_ptr<NcclCommunicator>& communicator) {
    const std::lock_guard<std::mutex> lock(mutex_);
    communicators_.erase(std::remove(communicators_.begin(), communicators_.end(), communicator), communicators_.end());
    return Reaper::begin({communicator}, Reaper::Way::Abort);
}

void DeviceStream::abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reaper_) return;
    limit_ = deadline_after(devices_->settings().abort_limit);
    reaper_ = Reaper::begin(std::move(communicators_), Reaper::Way::Abort);
    communicators_.clear();
}

// NCCL reports that an abort has returned, but not that all kernels have ended: a failed abort leaves them running.
bool DeviceStream::is_idle() {
    try {
        if (last_.empty())
            for (void* stream : {stream_, copies_})
                if (stream != nullptr) last_.push_back(context_->event_on(stream));
        return std::all_of(last_.begin(), last_.end(), [](const auto& event) { return event->passed(); });
    } catch (const DeviceError& error) {
        give_up_failed(*devices_, context_, error);
        return error.lasts;  // no kernel runs on such a device
    }
}

void DeviceStream::note(const DeviceError& error) const { give_up_failed(*devices_, context(), error); }

DeviceStream::Kernels DeviceStream::kernels() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!reaper_) return Kernels::Run;
    if (reaper_->over() && is_idle()) return Kernels::Ended;
    if (!is_past(limit_)) return Kernels::Ending;
    devices_->give_up("device " + std::to_string(context_ ? context_->index() : 0) +
                      " of this rank is held by an operation that NCCL has not aborted in " +
                      seconds_text(devices_->settings().abort_limit) +
                      " (RING_ABORT_LIMIT); restart this engine, which alone frees it");
    return Kernels::Hang;
}

}  // namespace ring
