#include "ring/communicator/device_side.hpp"

#include <algorithm>

#include "collectives/host/algorithm_parts.hpp"
#include "communicator/device/device_opening.hpp"
#include "ring/base/text.hpp"
#include "ring/collectives/paths.hpp"
#include "ring/communicator/progress.hpp"

namespace ring {

DeviceSide::DeviceSide(Communicator& owner, std::shared_ptr<DeviceStream> stream)
    : owner_(owner), stream_(std::move(stream)), way_(owner.size() == 1 ? Way::Nccl : Way::Unknown) {}

DeviceSide::~DeviceSide() {
    if (!owner_.ring_memory()->owned()) return;  // a forked process: what was launched belongs to its parent
    opening_.reset();
    if (!launched_.empty()) {
        owner_.group_->abort(FixedText("rank %d dropped a communicator with operations under way", owner_.rank()));
        owner_.announce_abort();
    }
    while (!launched_.empty()) {
        Served served = Served::Idle;
        owner_.generation_.progress->exclusively([&] { served = serve(); });
        if (served != Served::Done) cpu_yield();
    }
    stream().order().leave(*owner_.group_);
}

std::pair<std::string, std::string> DeviceSide::transport() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return transport_;
}

void DeviceSide::prepare(Work& work) const {
    const Request& request = work.request;
    auto device = std::make_shared<DeviceWork>();
    device->context = stream().use(request.device_index);
    device->stream = request.stream;
    try {
        if (device->context->is_capturing(request.stream))
            throw owner_.invalid(
                request,
                "its stream is being captured into a CUDA graph, which would repeat the kernel without the "
                "other ranks; leave collectives outside of torch.cuda.graph");
        device->ready.push_back(device->context->event_on(request.stream));
    } catch (const DeviceError& error) {
        stream().note(error);
        const std::string why = stream().devices().given_up();
        throw DeviceError(owner_.locate(work) + ": " + (why.empty() ? error.what() : why), error.lasts);
    }
    work.request.targets.clear();  // the result gets its own memory on the device
    work.device = std::move(device);
}

// --- agreement ---

void DeviceSide::connect(const NcclId& id, NcclCommunicator::Key key, int index) {
    const DeviceContext::Current current(*stream().context());  // which NCCL makes it for
    auto nccl = std::make_shared<NcclCommunicator>(stream().devices().nccl(), id, std::move(key), index);
    stream().adopt(nccl);
    nccl_ = std::move(nccl);
}

void DeviceSide::conclude(Way way, std::string reason) {
    way_ = way;
    reason_ = std::move(reason);
    const std::lock_guard<std::mutex> lock(mutex_);
    transport_ = {way_ == Way::Nccl ? "nccl" : "host", reason_};
}

std::shared_ptr<const Reaper> DeviceSide::disconnect() {
    const std::shared_ptr<NcclCommunicator> nccl = std::move(nccl_);
    return nccl ? stream().drop(nccl) : nullptr;
}

bool DeviceSide::must_agree(const std::vector<Header>& headers) const {
    return way_ == Way::Unknown && lead_header(headers).device == Device::Cuda;
}

void DeviceSide::agree(Work& work) {
    stream().order().leave(*owner_.group_);
    work.machine.stage = Work::Stage::Queued;
    opening_ = std::make_unique<DeviceOpening>(owner_, *this, work);
}

bool DeviceSide::is_agreeing(const Work& work) const { return opening_ && &opening_->asks() == &work; }

DeviceSide::Served DeviceSide::serve_agreement() {
    const Served served = opening_->advance();
    if (served != Served::Done) return served;
    opening_.reset();
    return Served::Moved;
}

// --- one operation ---

bool DeviceSide::through_host(const Work& work) const {
    if (work.is_check() || way_ == Way::Unknown) return false;
    return way_ != Way::Nccl || !nccl_moves(work.header, owner_.size());
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
    void* const copies = stream().copies();
    Request& request = work.request;
    const std::size_t item = item_size(request.dtype);
    const bool separate = request.kind == OpKind::ReduceScatter;
    std::size_t bytes = 0;
    for (const Piece& piece : request.pieces) bytes += round_up(piece.count * item, 64) * (separate ? 2 : 1);
    device.copies = stream().pinned(owner_.ring_memory(), bytes);
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
    void* const copies = stream().copies();
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
    stream().order().enter(*owner_.group_, work.machine.gate, owner_.fabric_ ? owner_.fabric_->id() : 0);
}

void DeviceSide::take_part(Work& work, Operation& operation, const Path& path) {
    const bool on_device = lead_header(operation.headers).device == Device::Cuda;
    if (on_device && way_ == Way::Error) throw Unsupported("RING_DEVICE=nccl, and NCCL cannot be used: " + reason_);
    if (!path.on_device) {
        if (on_device || work.request.kind == OpKind::Join) stream().order().leave(*owner_.group_);
        return;
    }
    if (!work.device) {  // it has joined
        work.device = std::make_shared<DeviceWork>();
        work.device->context = stream().context();
        work.device->stream = stream().handle();
    }
    operation.stream = stream_.get();
    operation.nccl = nccl_.get();
    operation.on_device = work.device.get();
}

void DeviceSide::take_no_part() { stream().order().leave(*owner_.group_); }

// --- what is under way on the device ---

void DeviceSide::watch(Launched launched) {
    launched_.push_back(std::move(launched));
    under_way_.fetch_add(1, std::memory_order_seq_cst);
    stream().operation_begins();
}

void DeviceSide::launch(const std::shared_ptr<Work>& work) {
    if (!work->device->done) bring_back(*work);
    watch({{work}, work->device, nullptr, work->deadline});
    work->launch();
}

void DeviceSide::launch_for_joined(Work& work) {
    if (work.device) watch({{}, std::move(work.device), nullptr, 0});
    work.device.reset();
}

bool DeviceSide::fail(const std::shared_ptr<Work>& work, const std::exception_ptr& error) {
    if (work->device || work->request.kind == OpKind::Join) stream().order().leave(*owner_.group_);
    if (is_agreeing(*work)) {
        try {
            if (std::shared_ptr<DeviceWork> launch = opening_->unfinished_launch())
                watch({{}, std::move(launch), error, 0});
        } catch (...) {  // no memory: the kernel's memory is freed early, in a generation that has ended
        }
        opening_.reset();
    }
    if (!work->device || !work->device->issued || work->is_check()) return false;
    try {
        watch({{work}, work->device, error, 0});
    } catch (...) {  // no memory: no thread will see the kernel end, so its tensors are never freed
        work->must_keep = true;
        return false;
    }
    return true;
}

void DeviceSide::follow(const Work& work, const std::shared_ptr<Work>& other) {
    for (Launched& one : launched_) {
        if (one.device != work.device) continue;
        other->device = work.device;
        other->result = work.result;
        one.works.push_back(other);
        other->launch();
        return;
    }
}

void DeviceSide::finish(Launched& launched, std::exception_ptr error, bool must_keep) noexcept {
    for (const std::shared_ptr<Work>& work : launched.works) {
        work->must_keep = must_keep;
        work->finish(error);
    }
    if (error && !launched.error) stream().late_failure()->note(error);
}

void DeviceSide::count_end() {
    under_way_.fetch_sub(1, std::memory_order_seq_cst);
    stream().operation_ends();
}

// Checks for reasons to end an operation on a device: an abort, an interrupt, a deadline.
void DeviceSide::check_launched() {
    if (owner_.group_->aborted()) throw Aborted(owner_.group_->abort_reason());
    const std::int64_t now = monotonic_ns();
    if (now < next_check_) return;
    next_check_ = now + kCheckEvery;
    owner_.read_notices();
    owner_.group_->check_members();
    if (nccl_ != nullptr && !opening_) nccl_->ready();
    for (const Launched& one : launched_)
        if (is_past(one.deadline))
            throw Timeout(owner_.locate(*one.works.front()) +
                          " timed out on its device: another rank has not launched it, or is not running");
}

// Ends the generation and the operations of NCCL in it.
void DeviceSide::abort(const std::exception_ptr& error) noexcept {
    error_ = error;
    try {
        std::rethrow_exception(error);
    } catch (const Aborted&) {
    } catch (const DeviceError& failed) {
        stream().note(failed);
        owner_.group_->abort(FixedText("rank %d stopped on its device: %s", owner_.rank(), failed.what()));
    } catch (const std::exception& other) {
        owner_.group_->abort(FixedText("rank %d stopped on its device: %s", owner_.rank(), other.what()));
    } catch (...) {
        owner_.group_->abort(FixedText("rank %d stopped on its device", owner_.rank()));
    }
    owner_.announce_abort();
    stream().abandon();
}

DeviceSide::Served DeviceSide::serve() {
    if (launched_.empty()) return Served::Idle;
    bool any = false;
    if (!error_) {
        try {
            for (auto one = launched_.begin(); one != launched_.end();) {
                if (one->error || !one->device->done || !one->device->done->passed()) {
                    ++one;
                    continue;
                }
                finish(*one, nullptr, false);
                one = launched_.erase(one);
                count_end();
                any = true;
            }
            if (!launched_.empty()) check_launched();
        } catch (...) {
            abort(std::current_exception());
        }
    }
    if (error_) {
        const DeviceStream::Kernels kernels = stream().kernels();
        if (kernels == DeviceStream::Kernels::Ending || kernels == DeviceStream::Kernels::Run) return Served::Polling;
        const bool hang = kernels == DeviceStream::Kernels::Hang;
        while (!launched_.empty()) {
            Launched& one = launched_.front();
            std::exception_ptr error = one.error ? one.error : error_;
            if (!one.works.empty() && !one.error) owner_.explain(*one.works.front(), error);
            finish(one, error, hang);
            launched_.pop_front();
            count_end();
        }
        any = true;
    }
    if (!any) return Served::OnDevice;
    owner_.idle_.ring();
    return Served::Done;
}

}  // namespace ring
