#include "ring/communicator/device_side.hpp"

#include <algorithm>

#include "collectives/host/algorithm_parts.hpp"
#include "communicator/device/device_opening.hpp"
#include "ring/base/text.hpp"
#include "ring/collectives/device/nccl_reduction.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {
DeviceSide::DeviceSide(Communicator& owner, std::shared_ptr<DeviceStream> stream)
    : owner_(owner),
      group_(std::move(stream), owner.size() == 1 ? DeviceGroup::Way::Nccl : DeviceGroup::Way::Unknown) {}

DeviceSide::~DeviceSide() {
    if (!owner_.domain()->owned()) return;  // a forked process: the flights belong to its parent
    opening_.reset();
    if (!flights_.empty()) {
        owner_.group_->abort(FixedText("rank %d dropped a communicator with operations under way", owner_.rank()));
        owner_.announce_abort();
    }
    while (!flights_.empty()) {
        Served served = Served::Idle;
        owner_.generation_.progress->exclusively([&] { served = serve(); });
        if (served != Served::Done) cpu_yield();
    }
    group_.stream().order().leave(*owner_.group_);
}

std::pair<std::string, std::string> DeviceSide::transport() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return transport_;
}

void DeviceSide::prepare(Work& work) const {
    const Request& request = work.request;
    auto device = std::make_shared<DeviceWork>();
    device->context = group_.stream().use(request.device_index);
    device->stream = request.stream;
    try {
        if (device->context->is_capturing(request.stream))
            throw owner_.invalid(
                request,
                "its stream is being captured into a CUDA graph, which would repeat the kernel without the "
                "other ranks; leave collectives outside of torch.cuda.graph");
        device->ready.push_back(device->context->event_on(request.stream));
    } catch (const DeviceError& error) {
        group_.stream().note(error);
        const std::string why = group_.stream().devices().given_up();
        throw DeviceError(owner_.locate(work) + ": " + (why.empty() ? error.what() : why), error.lasts);
    }
    work.request.targets.clear();  // the result gets its own memory on the device
    work.device = std::move(device);
}

// --- agreement ---

bool DeviceSide::must_agree(const std::vector<Header>& headers) const {
    return group_.way() == DeviceGroup::Way::Unknown && lead_header(headers).device == Device::Cuda;
}

void DeviceSide::agree(Work& work) {
    group_.stream().order().leave(*owner_.group_);
    work.machine.stage = Work::Stage::Queued;
    opening_ = std::make_unique<DeviceOpening>(owner_, group_, work);
}

bool DeviceSide::is_agreeing(const Work& work) const { return opening_ && &opening_->asks() == &work; }

DeviceSide::Served DeviceSide::serve_agreement() {
    const Served served = opening_->advance();
    if (served != Served::Done) return served;
    opening_.reset();
    const std::lock_guard<std::mutex> lock(mutex_);
    transport_ = {group_.way() == DeviceGroup::Way::Nccl ? "nccl" : "host", group_.reason()};
    return Served::Moved;
}

// --- one operation ---

bool DeviceSide::through_host(const Work& work) const {
    if (work.is_trial() || group_.way() == DeviceGroup::Way::Unknown) return false;
    return group_.way() != DeviceGroup::Way::Nccl || !nccl_moves(work.header, owner_.size());
}

bool DeviceSide::fetch(Work& work) {
    if (!work.device || !through_host(work)) return true;
    DeviceWork& device = *work.device;
    if (device.copied) {
        if (!device.copied->passed()) return false;
        device.issued = false;
        return true;
    }
    // A copy to memory that could not be pinned blocks until it is done. So it begins only when the tensors are ready,
    // on a stream that never waits: the tensors may wait for a kernel that only this thread can abort.
    for (const auto& ready : device.ready)
        if (!ready->passed()) return false;
    void* const copies = group_.stream().copies();
    Request& request = work.request;
    const std::size_t item = item_size(request.dtype);
    const bool separate = request.kind == OpKind::ReduceScatter;
    std::size_t bytes = 0;
    for (const Piece& piece : request.pieces) bytes += round_up(piece.count * item, 64) * (separate ? 2 : 1);
    device.copies = group_.stream().host_copies().take(device.context, owner_.domain(), bytes);
    device.tensors = request.pieces;
    device.issued = true;
    auto* at = static_cast<std::byte*>(device.copies->data());
    for (Piece& piece : request.pieces) {
        const std::size_t size = piece.count * item;
        if (request.kind != OpKind::Broadcast || request.root == owner_.index())
            device.context->copy_to_host(at, piece.input, size, copies);
        std::byte* const output = separate ? at + round_up(size, 64) : at;
        at += round_up(size, 64) * (separate ? 2 : 1);
        piece = {output - (separate ? round_up(size, 64) : 0), output, piece.count};
    }
    device.copied = device.context->event_on(copies);
    request.device = Device::Cpu;
    device.issued = !device.copied->passed();
    return !device.issued;
}

void DeviceSide::bring_back(Work& work) {
    const Request& request = work.request;
    DeviceWork& device = *work.device;
    void* const copies = group_.stream().copies();
    const std::size_t item = item_size(request.dtype);
    if (output_of(request.kind) == Output::Parts) {
        Result& result = work.result;
        result.on_device = std::make_shared<DeviceMemory>(device.context, result.bytes, copies, device.stream);
        device.context->copy_to_device(result.on_device->data(), result.data.get(), result.bytes, copies);
    }
    for (std::size_t i = 0; i < device.tensors.size() && device.tensors[i].output != nullptr; ++i) {
        std::uint64_t count = device.tensors[i].count;
        if (request.kind == OpKind::ReduceScatter)
            count = row_range(count, request.shape[0], owner_.size(), owner_.index()).size();
        device.context->copy_to_device(device.tensors[i].output, request.pieces[i].output, count * item, copies);
    }
    device.done = device.context->event_on(copies);
}

void DeviceSide::posted(const Work& work) {
    if (work.request.kind != OpKind::Join && in_host_memory(work.header.device)) return;
    group_.stream().order().enter(*owner_.group_, work.machine.gate, owner_.fabric_ ? owner_.fabric_->id() : 0);
}

void DeviceSide::take_part(Work& work, Operation& operation, const Path& path) {
    const bool on_device = lead_header(operation.headers).device == Device::Cuda;
    if (on_device && group_.way() == DeviceGroup::Way::Error)
        throw Unsupported("RING_DEVICE=nccl, and NCCL cannot be used: " + group_.reason());
    if (!path.on_device) {
        if (on_device || work.request.kind == OpKind::Join) group_.stream().order().leave(*owner_.group_);
        return;
    }
    if (!work.device) {  // it has joined
        work.device = std::make_shared<DeviceWork>();
        work.device->context = group_.stream().context();
        work.device->stream = group_.stream().handle();
    }
    operation.devices = &group_;
    operation.on_device = work.device.get();
}

void DeviceSide::take_no_part() { group_.stream().order().leave(*owner_.group_); }

// --- what is under way on the device ---

void DeviceSide::fly(Flight flight) {
    flights_.push_back(std::move(flight));
    under_way_.fetch_add(1, std::memory_order_seq_cst);
    group_.stream().take_off();
}

void DeviceSide::launch(const std::shared_ptr<Work>& work) {
    if (!work->device->done) bring_back(*work);
    fly({{work}, work->device, nullptr, work->deadline});
    work->launch();
}

void DeviceSide::launch_for_joined(Work& work) {
    if (work.device) fly({{}, std::move(work.device), nullptr, 0});
    work.device.reset();
}

bool DeviceSide::fail(const std::shared_ptr<Work>& work, const std::exception_ptr& error) {
    if (work->device || work->request.kind == OpKind::Join) group_.stream().order().leave(*owner_.group_);
    if (is_agreeing(*work)) {
        try {
            if (std::shared_ptr<DeviceWork> launch = opening_->unfinished_launch())
                fly({{}, std::move(launch), error, 0});
        } catch (...) {  // no memory: the kernel's memory is freed early, in a generation that has ended
        }
        opening_.reset();
    }
    if (!work->device || !work->device->issued || work->is_trial()) return false;
    try {
        fly({{work}, work->device, error, 0});
    } catch (...) {  // no memory: no thread will see the kernel end, so its tensors are never freed
        work->must_keep = true;
        return false;
    }
    return true;
}

void DeviceSide::follow(const Work& work, const std::shared_ptr<Work>& other) {
    for (Flight& flight : flights_) {
        if (flight.device != work.device) continue;
        other->device = work.device;
        other->result = work.result;
        flight.works.push_back(other);
        other->launch();
        return;
    }
}

void DeviceSide::land(Flight& flight, std::exception_ptr error, bool must_keep) noexcept {
    for (const std::shared_ptr<Work>& work : flight.works) {
        work->must_keep = must_keep;
        work->finish(error);
    }
    if (error && !flight.error) group_.stream().late_failure()->note(error);
}

void DeviceSide::touch_down() {
    under_way_.fetch_sub(1, std::memory_order_seq_cst);
    group_.stream().land();
}

// Checks for reasons to end an operation on a device: an abort, an interrupt, a deadline.
void DeviceSide::check_flights() {
    if (owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
    const std::int64_t now = monotonic_ns();
    if (now < next_check_) return;
    next_check_ = now + kCheckEvery;
    if (owner_.generation_.fabric) owner_.generation_.fabric->notices().read(*owner_.generation_.group);
    if (owner_.fabric_ && owner_.fabric_ != owner_.generation_.fabric) owner_.fabric_->notices().read(*owner_.group_);
    owner_.group_->check_members();
    if (group_.nccl() != nullptr && !opening_) group_.nccl()->ready();
    for (const Flight& flight : flights_)
        if (is_past(flight.deadline))
            throw Timeout(owner_.locate(*flight.works.front()) +
                          " timed out on its device: another rank has not launched it, or is not running");
}

// Ends the generation and the operations of NCCL in it.
void DeviceSide::abort(const std::exception_ptr& error) noexcept {
    error_ = error;
    try {
        std::rethrow_exception(error);
    } catch (const Aborted&) {
    } catch (const DeviceError& failed) {
        group_.stream().note(failed);
        owner_.group_->abort(FixedText("rank %d stopped on its device: %s", owner_.rank(), failed.what()));
    } catch (const std::exception& other) {
        owner_.group_->abort(FixedText("rank %d stopped on its device: %s", owner_.rank(), other.what()));
    } catch (...) {
        owner_.group_->abort(FixedText("rank %d stopped on its device", owner_.rank()));
    }
    owner_.announce_abort();
    group_.stream().abandon();
}

DeviceSide::Served DeviceSide::serve() {
    if (flights_.empty()) return Served::Idle;
    bool landed = false;
    if (!error_) {
        try {
            for (auto flight = flights_.begin(); flight != flights_.end();) {
                if (flight->error || !flight->device->done || !flight->device->done->passed()) {
                    ++flight;
                    continue;
                }
                land(*flight, nullptr, false);
                flight = flights_.erase(flight);
                touch_down();
                landed = true;
            }
            if (!flights_.empty()) check_flights();
        } catch (...) {
            abort(std::current_exception());
        }
    }
    if (error_) {
        const DeviceStream::Kernels kernels = group_.stream().kernels();
        if (kernels == DeviceStream::Kernels::Ending || kernels == DeviceStream::Kernels::Run) return Served::Polling;
        const bool hang = kernels == DeviceStream::Kernels::Hang;
        while (!flights_.empty()) {
            Flight& flight = flights_.front();
            std::exception_ptr error = flight.error ? flight.error : error_;
            if (!flight.works.empty() && !flight.error) owner_.explain(*flight.works.front(), error);
            land(flight, error, hang);
            flights_.pop_front();
            touch_down();
        }
        landed = true;
    }
    if (!landed) return Served::Flying;
    owner_.idle_.ring();
    return Served::Done;
}

}  // namespace ring
