// One function per category; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

#include "ring/group/host_group.hpp"

void register_errors(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_link(pybind11::module_& module);
void register_communicator(pybind11::module_& module);

// Thrown while Python's error indicator of this thread is set; not a std::exception, so nothing takes it for one.
struct PythonSignal {};

// Lets Python's signal handlers run. Called without the GIL, every now and then, by whoever waits.
ring::Interruption signal_check();
