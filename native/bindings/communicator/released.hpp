// A communicator as Python holds it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

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
