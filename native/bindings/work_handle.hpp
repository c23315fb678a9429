// A communicator and an operation under way, as Python holds them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "register.hpp"
#include "ring/base/errors.hpp"
#include "ring/communicator/communicator.hpp"

// Releasing a communicator waits for other ranks and threads, which may need the interpreter.
inline std::shared_ptr<ring::Communicator> released_unlocked(std::shared_ptr<ring::Communicator> communicator) {
    ring::Communicator* raw = communicator.get();
    if (raw == nullptr) return nullptr;
    return {raw, [communicator = std::move(communicator)](ring::Communicator*) mutable {
                if (PyGILState_Check() == 0) return communicator.reset();
                const pybind11::gil_scoped_release nogil;
                communicator.reset();
            }};
}

// An operation under way.
struct WorkHandle {
    std::shared_ptr<ring::Communicator> communicator;
    std::shared_ptr<ring::Work> work;  // null where the operation was complete, without a result, before the handle

    bool done() const { return !work || communicator->look(*work); }
    void wait(double timeout) const {
        if (!work) return;
        if (work->done()) return work->get();
        const ring::Spending spending(communicator->recorder());
        if (!communicator->look_briefly(*work)) {
            const pybind11::gil_scoped_release nogil;
            communicator->wait(*work, timeout, signal_check());
        }
        communicator->note_caller(*work, spending.begin());
        work->get();
    }
    // For an operation on a device, waits for its launch and makes `stream` wait for the results; else waits until
    // done.
    void order(std::uintptr_t stream, double timeout) const {
        if (!work) return;
        const ring::Spending spending(communicator->recorder());
        if (!work->launched()) {
            const pybind11::gil_scoped_release nogil;
            communicator->wait_launched(*work, timeout, signal_check());
        }
        communicator->note_caller(*work, spending.begin());
        work->get();
        work->hold_back(reinterpret_cast<void*>(stream));
    }
    ring::Result& result() const {
        if (!work) throw ring::InvalidArgument("this operation has no result but its tensors");
        if (!work->launched())
            throw communicator->invalid(work->request, "it has no result before it is done: wait for it");
        work->get();  // one that has failed has none either
        return work->result;
    }
};
