// One function per category; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

#include "ring/group/host_group.hpp"

void register_errors(pybind11::module_& module);
void register_settings(pybind11::module_& module);
void register_paths(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_link(pybind11::module_& module);
void register_communicator(pybind11::module_& module);
void register_devices(pybind11::module_& module);
void register_member_group(pybind11::module_& module);
void register_messages(pybind11::module_& module);
void register_tensor_calls(pybind11::module_& module);

// Thrown while Python's error indicator of this thread is set; not a std::exception, so nothing takes it for one.
struct PythonSignal {};

// Lets Python's signal handlers run. A waiting thread calls it every 50 ms, without the GIL.
ring::Interruption signal_check();
