#include "tensors/tensor_work.hpp"

#include <structmember.h>

#include <new>
#include <utility>

#include "guarded.hpp"

namespace py = pybind11;

namespace {

struct TensorWork {
    PyObject_HEAD WorkHandle handle;
    PyObject* tensors;
    PyObject* held;  // the list that it is in; null from the first `wait` on
    char waited;
};

PyTypeObject* tensor_work_type = nullptr;

TensorWork& tensor_work(PyObject* self) { return *reinterpret_cast<TensorWork*>(self); }

// Nobody touches the memory any more.
void leave_list(PyObject* self) {
    PyObject* list = std::exchange(tensor_work(self).held, nullptr);
    tensor_work(self).waited = 1;
    if (list == nullptr) return;
    for (Py_ssize_t at = PyList_GET_SIZE(list); at-- > 0;) {
        if (PyList_GET_ITEM(list, at) != self) continue;
        if (PyList_SetSlice(list, at, at + 1, nullptr) != 0) PyErr_Clear();  // it is forgotten with those that are done
        break;
    }
    Py_DECREF(list);
}

PyObject* wait_until_done(PyObject* self) {
    return guarded([&] {
        struct Leaving {
            PyObject* self;
            ~Leaving() { leave_list(self); }
        } const leaving{self};
        tensor_work(self).handle.wait(0.0);
        return Py_NewRef(tensor_work(self).tensors);
    });
}

PyObject* wait(PyObject* self, PyObject*) { return wait_until_done(self); }

PyObject* wait_done(PyObject* self, PyObject*) {
    PyObject* tensors = wait_until_done(self);
    if (tensors == nullptr) return nullptr;
    Py_DECREF(tensors);
    Py_RETURN_NONE;
}

PyObject* done(PyObject* self, PyObject*) {
    return guarded([&] { return Py_NewRef(tensor_work(self).handle.done() ? Py_True : Py_False); });
}

PyObject* keep_forever(PyObject*, PyObject*) { Py_RETURN_NONE; }

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(tensor_work(self).tensors);
    Py_VISIT(tensor_work(self).held);
    return 0;
}

int clear(PyObject* self) {
    Py_CLEAR(tensor_work(self).tensors);
    Py_CLEAR(tensor_work(self).held);
    return 0;
}

void deallocate(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    tensor_work(self).handle.~WorkHandle();
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"wait", wait, METH_NOARGS, "The tensors, once the operation has completed. Raises its error."},
    {"wait_done", wait_done, METH_NOARGS, "`wait` without a result."},
    {"done", done, METH_NOARGS, "Whether `wait` would return at once."},
    {"launched", done, METH_NOARGS, "The same: no device carries it out."},
    {"keep_forever", keep_forever, METH_NOARGS, "Nothing: no device may touch its memory."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"waited", T_BOOL, offsetof(TensorWork, waited), READONLY, "Whether a `wait` has ended."},
    {nullptr, 0, 0, 0, nullptr},
};

template <class Function>
void* slot(Function* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace

PyObject* make_tensor_work(WorkHandle handle, PyObject* tensors, PyObject* held) {
    PyObject* self = tensor_work_type->tp_alloc(tensor_work_type, 0);
    if (self == nullptr) return nullptr;
    const bool under_way = handle.work != nullptr;
    TensorWork& made = tensor_work(self);
    new (&made.handle) WorkHandle(std::move(handle));
    made.tensors = Py_NewRef(tensors);
    made.waited = under_way ? 0 : 1;
    if (under_way) {
        made.held = Py_NewRef(held);
        if (PyList_Append(held, self) != 0) {
            Py_DECREF(self);
            return nullptr;
        }
    }
    return self;
}

void register_tensor_work(py::module_& module) {
    PyType_Slot slots[] = {
        {Py_tp_doc, const_cast<char*>("An allreduce of tensors that has been started; see tensor_work.hpp.")},
        {Py_tp_methods, methods},
        {Py_tp_members, members},
        {Py_tp_traverse, slot(traverse)},
        {Py_tp_clear, slot(clear)},
        {Py_tp_dealloc, slot(deallocate)},
        {0, nullptr},
    };
    PyType_Spec spec{"ring_notebook._core.TensorWork", sizeof(TensorWork), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!type) throw py::error_already_set();
    tensor_work_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    module.attr("TensorWork") = type;
}
