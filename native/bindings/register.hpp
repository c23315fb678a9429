// One function per category, which module.cpp calls, and helpers that they share.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <utility>

#include "ring/base/dtypes_and_ops.hpp"
#include "ring/base/errors.hpp"
#include "ring/group/host_group.hpp"

namespace ring {
class Communicator;
}

void register_errors(pybind11::module_& module);
void register_types(pybind11::module_& module);
void register_settings(pybind11::module_& module);
void register_frames(pybind11::module_& module);
void register_bytes(pybind11::module_& module);
void register_paths(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_link(pybind11::module_& module);
void register_communicator(pybind11::module_& module);
void register_devices(pybind11::module_& module);
void register_foreign(pybind11::module_& module);
void register_tensors(pybind11::module_& module);

// Thrown while this thread's Python error indicator is set. Not a std::exception, so that no handler catches it as one.
struct PythonSignal {};

// Lets Python's signal handlers run. A waiting thread calls it every 50 ms, without the GIL.
ring::Interruption signal_check();
// The same, and keeps the exception of a signal in `interrupt`, because Python code cannot run while it is set.
ring::Interruption signal_check(pybind11::object& interrupt);

// The number of the line that has called an operation, in the log of the communicator's operations; 0 where there is
// none. Needs the GIL.
std::uint32_t call_site(const ring::Communicator& communicator);

// The value of an enum that has this number. Throws InvalidArgument, which names the argument.
template <class Enum>
Enum enum_argument(const char* name, int number, int values) {
    if (number < 0 || number >= values)
        throw ring::InvalidArgument(std::string(name) + " must be between 0 and " + std::to_string(values - 1) +
                                    ", got " + std::to_string(number));
    return static_cast<Enum>(number);
}

inline ring::DType dtype_argument(int number) {
    return enum_argument<ring::DType>("dtype", number, ring::kValues<ring::DType>);
}
inline ring::ReduceOp op_argument(int number) {
    return enum_argument<ring::ReduceOp>("op", number, ring::kValues<ring::ReduceOp>);
}
inline ring::Device device_argument(int number) {
    return enum_argument<ring::Device>("device", number, ring::kValues<ring::Device>);
}

inline ring::OpKind operation_argument(std::string_view name) {
    for (int kind = 0; kind < ring::kValues<ring::OpKind>; ++kind)
        if (name == ring::to_string(static_cast<ring::OpKind>(kind))) return static_cast<ring::OpKind>(kind);
    throw ring::InvalidArgument("there is no operation '" + std::string(name) + "'");
}

// The choice of that name among those of a setting.
template <class Choice, std::size_t N>
Choice chosen(const char* setting, const std::string& text, const std::pair<const char*, Choice> (&choices)[N]) {
    std::string names;
    for (const auto& [name, choice] : choices) {
        if (text == name) return choice;
        names += (names.empty() ? "'" : ", '") + std::string(name) + "'";
    }
    throw ring::InvalidArgument(std::string(setting) + "='" + text + "': expected one of " + names);
}

// Bytes that another process has written need not be valid text.
inline pybind11::str python_text(std::string_view bytes) {
    return pybind11::reinterpret_steal<pybind11::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<pybind11::ssize_t>(bytes.size()), "replace"));
}

// For C functions that Python calls without pybind11: returns the result of `body`, or null with a Python error set, as
// pybind11 would set it, when `body` throws.
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
