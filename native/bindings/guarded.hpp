// What C functions that Python calls without pybind11 throw, raised as pybind11 does.
#pragma once

#include <pybind11/pybind11.h>

// What `body` returns; null with a Python error set when it throws.
template <class Body>
PyObject* guarded(Body&& body) {
    try {
        return body();
    } catch (pybind11::error_already_set& error) {
        error.restore();
    } catch (...) {
        pybind11::detail::try_translate_exceptions();
    }
    return nullptr;
}
