// An allreduce of tensors that has been started. Python makes and drops one in less time than a small operation takes,
// which objects of pybind11 do not.
#pragma once

#include <pybind11/pybind11.h>

#include "communicator/work_handle.hpp"

// A new handle; null with a Python error set. It owns a reference to `tensors`, which its `wait` returns, and is in the
// list `held`, so that dropping it leaves the memory under the operation alone, until it has been waited for; one that
// has ended already is not put there.
PyObject* make_tensor_work(WorkHandle handle, PyObject* tensors, PyObject* held);

void register_tensor_work(pybind11::module_& module);
