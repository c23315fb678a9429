#include "ring/communicator/work.hpp"

#include <utility>

#include "collectives/inter_host/header_exchange.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/device/device_stream.hpp"
#include "ring/collectives/inter_host/standstill_watch.hpp"

namespace ring {

Work::Work() = default;
Work::~Work() = default;

void Work::get() const {
    if (state() != State::Failed) return;
    try {
        std::rethrow_exception(error);
    } catch (const Mismatch&) {
        throw;
    } catch (const Unsupported&) {
        throw;
    } catch (...) {
        if (late) late->tell();
        throw;
    }
}

void Work::hold_back(void* stream) const {
    if (launched() && device && device->done) device->done->hold_back(stream);
}

void Work::finish(std::exception_ptr why) noexcept {
    error = std::move(why);
    machine.algorithm.reset();
    machine.agreement.reset();
    machine.bounce.reset();
    if (device) device->copies.reset();
    times.end(!error);
    if (machine.watched) machine.watched->forget(this);
    change(error ? State::Failed : State::Done);
}

void Work::launch() noexcept { change(State::Launched); }

void Work::change(State state) noexcept {
    state_.store(state, std::memory_order_seq_cst);
    bell_.ring();
}

}  // namespace ring
