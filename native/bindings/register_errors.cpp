#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <string>

#include "register.hpp"
#include "ring/base/errors.hpp"

namespace py = pybind11;

namespace {

// Finds the class by name: a static reference would outlive the interpreter.
void raise(const char* name, const std::string& message) {
    try {
        // A reason from another rank may be cut in the middle of a character.
        PyErr_SetObject(py::module_::import("ring_notebook.errors").attr(name).ptr(), python_text(message).ptr());
    } catch (py::error_already_set& failed) {
        failed.restore();
    }
}

}  // namespace

ring::Interruption signal_check() {
    return [] {
        // Python runs handlers only in the main thread; another thread would take the GIL for nothing.
        if (static_cast<pid_t>(syscall(SYS_gettid)) != getpid()) return;
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw PythonSignal{};
    };
}

ring::Interruption signal_check(py::object& interrupt) {
    return [&interrupt, look = signal_check()] {
        try {
            look();
        } catch (...) {
            const py::gil_scoped_acquire gil;
            interrupt = py::error_already_set().value();
            throw;
        }
    };
}

void register_errors(py::module_& module) {
    (void)module;
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const PythonSignal&) {
            // The error indicator has the exception of the signal handler.
        } catch (const ring::Mismatch& error) {
            raise("CollectiveMismatch", error.what());
        } catch (const ring::Aborted& error) {
            raise("CollectiveAborted", error.what());
        } catch (const ring::Timeout& error) {
            raise("CollectiveTimeout", error.what());
        } catch (const ring::OutOfMemory& error) {
            raise("OutOfRingMemoryError", error.what());
        } catch (const ring::InvalidArgument& error) {
            py::set_error(PyExc_ValueError, error.what());
        } catch (const ring::Error& error) {
            raise("RingError", error.what());
        }
    });
}
