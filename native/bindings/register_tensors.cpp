// Reads the tensors of a framework through DLPack's C functions, without a call into its Python code, and starts
// collectives on the tensors themselves. Small operations spend most of their time in these calls, so they bypass
// pybind11's conversion of arguments, which takes longer than such an operation.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "dlpack.hpp"
#include "register.hpp"
#include "ring/base/dtypes_and_ops.hpp"
#include "ring/base/errors.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "work_handle.hpp"

namespace py = pybind11;
using ring::Communicator;

namespace {

// A tensor that the core can use in place: dense, contiguous, in host memory, of a supported dtype.
struct TensorView {
    std::byte* data = nullptr;
    std::uint64_t count = 0;  // elements
    ring::DType dtype = ring::DType::UInt8;
    int dims = 0;
    const std::int64_t* shape = nullptr;  // owned by the tensor, valid until its shape changes
};

class TensorReader {
   public:
    // `types` are the exact types of tensors: a derived class may give its memory another meaning. `is_neg` returns
    // whether a tensor's values are those in memory with the sign changed. `flat`: tensors with the same number of
    // elements match, whatever their shapes. Throws InvalidArgument where the first type has no such functions.
    TensorReader(py::tuple types, py::object is_neg, bool flat);
    // False for anything that is not such a tensor, with no Python error set.
    bool read(PyObject* tensor, TensorView& view) const;
    bool flat() const { return flat_; }

   private:
    bool is_negative(PyObject* tensor) const;

    int (*read_)(void* object, dlpack::Tensor* out);
    py::tuple types_;
    py::object is_neg_;
    bool flat_;
};

// Null where the framework has no such function, or uses another ABI version.
auto read_function(const py::handle& type) {
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    const dlpack::ExchangeApi* api = nullptr;
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) != 0)
        api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    while (api != nullptr && api->major != dlpack::kMajor) api = api->previous;
    return api == nullptr ? nullptr : api->tensor_from_object;
}

bool known_dtype(const dlpack::Tensor& tensor, ring::DType& dtype) {
    if (tensor.code >= dlpack::kCodes || tensor.bits % 8 != 0 || tensor.bits > 8 * dlpack::kMostBytes) return false;
    const std::int8_t number = dlpack::kByCode[tensor.code][tensor.bits / 8];
    dtype = static_cast<ring::DType>(number);
    return number >= 0 && tensor.lanes == 1;
}

bool is_contiguous(const dlpack::Tensor& tensor, std::uint64_t count) {
    if (tensor.strides == nullptr || count == 0) return true;
    std::int64_t expected = 1;
    for (int dim = tensor.ndim - 1; dim >= 0; --dim) {
        if (tensor.shape[dim] == 1) continue;
        if (tensor.strides[dim] != expected) return false;
        expected *= tensor.shape[dim];
    }
    return true;
}

TensorReader::TensorReader(py::tuple types, py::object is_neg, bool flat)
    : read_(read_function(types[0])), types_(std::move(types)), is_neg_(std::move(is_neg)), flat_(flat) {
    if (read_ == nullptr)
        throw ring::InvalidArgument("tensors of this framework cannot be read by DLPack's C functions, version 1");
}

// The negative bit is not in the tensor's memory. Only the framework knows it.
bool TensorReader::is_negative(PyObject* tensor) const {
    PyObject* answer = PyObject_Vectorcall(is_neg_.ptr(), &tensor, 1, nullptr);
    if (answer == nullptr) PyErr_Clear();
    const bool is = answer != Py_False;
    Py_XDECREF(answer);
    return is;
}

bool TensorReader::read(PyObject* tensor, TensorView& view) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    bool known = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_.ptr()); ++i) known |= PyTuple_GET_ITEM(types_.ptr(), i) == type;
    if (!known) return false;
    dlpack::Tensor raw{};
    if (read_(tensor, &raw) != 0) {  // out of memory, or a tensor that DLPack cannot describe
        PyErr_Clear();
        return false;
    }
    std::uint64_t count = 1;
    for (int dim = 0; dim < raw.ndim; ++dim) count *= static_cast<std::uint64_t>(raw.shape[dim]);
    if (raw.device_type != dlpack::kCpu || !known_dtype(raw, view.dtype) || !is_contiguous(raw, count) ||
        (raw.data == nullptr && count > 0) || is_negative(tensor))
        return false;
    view.data = static_cast<std::byte*>(raw.data) + raw.byte_offset;
    view.count = count;
    view.dims = raw.ndim;
    view.shape = raw.shape;
    return true;
}

// An allreduce of tensors that has been started. Python creates and destroys one in less time than a small operation
// takes; for an object of pybind11 it takes longer.
struct TensorWork {
    PyObject_HEAD WorkHandle handle;
    PyObject* tensors;
    PyObject* held;  // the list that it is in; null from the first `wait` on
    char waited;
};

PyTypeObject* tensor_work_type = nullptr;

TensorWork& tensor_work(PyObject* self) { return *reinterpret_cast<TensorWork*>(self); }

// Call it when no thread touches the memory any more.
void leave_list(PyObject* self) {
    PyObject* list = std::exchange(tensor_work(self).held, nullptr);
    tensor_work(self).waited = 1;
    if (list == nullptr) return;
    for (Py_ssize_t at = PyList_GET_SIZE(list); at-- > 0;) {
        if (PyList_GET_ITEM(list, at) != self) continue;
        if (PyList_SetSlice(list, at, at + 1, nullptr) != 0)
            PyErr_Clear();  // it is removed later, with those that are done
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
    {"done", done, METH_NOARGS, "Whether `wait` would return without waiting."},
    {"ended", done, METH_NOARGS, "The same as `done`: no device carries it out."},
    {"launched", done, METH_NOARGS, "The same as `done`: no device carries it out."},
    {"keep_forever", keep_forever, METH_NOARGS, "Does nothing: no device can touch its memory."},
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

// A new handle; null with a Python error set. It owns a reference to `tensors`, which its `wait` returns. Until `wait`
// ends it is in the list `held`, so that the tensors outlive the operation also when Python drops the handle. A handle
// whose operation has ended already is not added to the list.
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
        {Py_tp_doc, const_cast<char*>("An allreduce of tensors that has been started; see register_tensors.cpp.")},
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

double number_argument(PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
}

ring::ReduceOp op_argument(PyObject* value) {
    const long number = PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return ::op_argument(static_cast<int>(number));
}

std::string_view text_argument(PyObject* value) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == nullptr) throw py::error_already_set();
    return {text, static_cast<std::size_t>(length)};
}

constexpr Py_ssize_t kMostTensors = 32;

// The data of one communicator's calls, in a capsule that is the `self` of both functions: arguments of pybind11's
// types would each cost a lookup.
struct Calls {
    py::object owner;
    const TensorReader* reader;
    std::shared_ptr<Communicator> communicator;
};

constexpr const char* kCalls = "ring_notebook._core.TensorReader.calls";

const Calls& calls_of(PyObject* self) { return *static_cast<const Calls*>(PyCapsule_GetPointer(self, kCalls)); }

// The arguments of a call, as a description of the operation.
class TensorCall {
   public:
    enum { kTensors, kOutputs, kOp, kPrescale, kPostscale, kName, kTimeout, kArguments };

    // False for tensors that the reader cannot use, and for lists that are long or share memory.
    bool read(const TensorReader& reader, PyObject* const* arguments, Py_ssize_t count, Py_ssize_t others = 0) {
        if (count != kArguments + others)
            throw py::type_error("wrong number of arguments; _core.pyi has the signature");
        if (!read_tensors(reader, arguments[kTensors], arguments[kOutputs])) return false;
        call_.op = op_argument(arguments[kOp]);
        call_.prescale = number_argument(arguments[kPrescale]);
        call_.postscale = number_argument(arguments[kPostscale]);
        call_.name = text_argument(arguments[kName]);
        timeout_ = number_argument(arguments[kTimeout]);
        return true;
    }
    const ring::SmallAllreduce& call() const { return call_; }
    ring::Request request() const { return call_.request(call_.shape); }
    double timeout() const { return timeout_; }

   private:
    // One tensor, or a list or tuple of tensors of one dtype.
    bool read_tensors(const TensorReader& reader, PyObject* tensors, PyObject* outputs) {
        const bool several = PyList_CheckExact(tensors) || PyTuple_CheckExact(tensors);
        if (!several) {
            TensorView view;
            if (!read_pair(reader, tensors, outputs, view, pieces_[0])) return false;
            call_.dims = view.dims;
            call_.shape = view.shape;
        } else {
            const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
            const bool alike = outputs == tensors || PyList_CheckExact(outputs) || PyTuple_CheckExact(outputs);
            if (count < 1 || count > kMostTensors || !alike || PySequence_Fast_GET_SIZE(outputs) != count) return false;
            call_.layout = ring::kNoShapes;
            call_.tensors = static_cast<int>(count);
            for (Py_ssize_t i = 0; i < count; ++i) {
                TensorView view;
                if (!read_pair(reader, PySequence_Fast_GET_ITEM(tensors, i), PySequence_Fast_GET_ITEM(outputs, i), view,
                               pieces_[i]))
                    return false;
                if (i > 0 && view.dtype != call_.dtype) return false;
                call_.layout = ring::add_shape(call_.layout, view.shape, view.dims);
                call_.dims = view.dims;
                call_.shape = view.shape;
            }
            // One tensor has a shape, several have a layout.
            if (count == 1) call_.layout = 0;
            if (count > 1) call_.dims = 0;
        }
        call_.pieces = pieces_;
        return !share_memory();
    }

    bool read_pair(const TensorReader& reader, PyObject* tensor, PyObject* output, TensorView& view,
                   ring::Piece& piece) {
        if (!reader.read(tensor, view)) return false;
        if (reader.flat()) {
            flat_shape_ = static_cast<std::int64_t>(view.count);
            view.dims = 1;
            view.shape = &flat_shape_;
        }
        piece = {view.data, view.data, view.count};
        if (output != tensor) {
            TensorView target;
            if (!reader.read(output, target) || target.count != view.count || target.dtype != view.dtype) return false;
            piece.output = target.data;
        }
        if (call_.count == 0) call_.dtype = view.dtype;
        call_.count += view.count;
        return true;
    }

    // Whether two outputs share memory, which is an error that the ordinary way raises.
    bool share_memory() const {
        const std::size_t item = ring::item_size(call_.dtype);
        for (int i = 0; i < call_.tensors; ++i)
            for (int j = 0; j < i; ++j)
                if (pieces_[i].count > 0 && pieces_[j].count > 0 &&
                    pieces_[i].output < pieces_[j].output + pieces_[j].count * item &&
                    pieces_[j].output < pieces_[i].output + pieces_[i].count * item)
                    return true;
        return false;
    }

    ring::SmallAllreduce call_;
    double timeout_ = 0.0;
    std::int64_t flat_shape_ = 0;  // of the tensor read last
    ring::Piece pieces_[kMostTensors];
};

PyObject* allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        const Calls& calls = calls_of(self);
        TensorCall given;
        if (!given.read(*calls.reader, arguments, count)) Py_RETURN_FALSE;
        Communicator& communicator = *calls.communicator;
        {
            std::optional<py::gil_scoped_release> nogil;
            if (!communicator.allreduce_small(given.call(), given.timeout(), signal_check(), [&] {
                    const std::uint32_t site = call_site(communicator);
                    nogil.emplace();
                    return site;
                })) {
                ring::Request request = given.request();
                request.site = call_site(communicator);
                nogil.emplace();
                communicator.call(std::move(request), given.timeout(), signal_check());
            }
        }
        Py_RETURN_TRUE;
    });
}

PyObject* start_allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        const Calls& calls = calls_of(self);
        TensorCall given;
        if (!given.read(*calls.reader, arguments, count, 1)) Py_RETURN_NONE;
        std::shared_ptr<ring::Work> work;
        // An operation with a name matches by name.
        if (!given.call().name.empty() || !calls.communicator->start_small(given.call(), given.timeout(), work)) {
            ring::Request request = given.request();
            request.site = call_site(*calls.communicator);
            const py::gil_scoped_release nogil;
            work = calls.communicator->start(std::move(request), given.timeout());
        } else if (work) {
            work->times.set_site(call_site(*calls.communicator));
        }
        return make_tensor_work({calls.communicator, std::move(work)}, arguments[TensorCall::kTensors],
                                arguments[TensorCall::kArguments]);
    });
}

PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef allreduce_method = {
    "allreduce", fast_call(allreduce), METH_FASTCALL,
    "Reduce a tensor, or a list of tensors. Returns False and does nothing for tensors that it cannot read."};
PyMethodDef start_allreduce_method = {
    "start_allreduce", fast_call(start_allreduce), METH_FASTCALL,
    "Start the same without waiting. Returns None and does nothing for tensors that it cannot read."};

py::object function(PyMethodDef& method, const py::object& self) {
    auto made = py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
    if (!made) throw py::error_already_set();
    return made;
}

py::tuple bound_calls(const py::object& reader, std::shared_ptr<Communicator> communicator) {
    auto* calls = new Calls{reader, py::cast<const TensorReader*>(reader), std::move(communicator)};
    const py::capsule self(calls, kCalls, [](PyObject* capsule) { delete &calls_of(capsule); });
    return py::make_tuple(function(allreduce_method, self), function(start_allreduce_method, self));
}

}  // namespace

void register_tensors(py::module_& module) {
    register_tensor_work(module);
    py::class_<TensorReader>(module, "TensorReader", "Reads a framework's tensors; see register_tensors.cpp.")
        .def(py::init<py::tuple, py::object, bool>(), py::arg("types"), py::arg("is_neg"), py::arg("flat") = false)
        .def(
            "read",
            [](const TensorReader& self, const py::object& tensor) -> py::object {
                TensorView view;
                if (!self.read(tensor.ptr(), view)) return py::none();
                py::tuple shape(view.dims);
                for (int dim = 0; dim < view.dims; ++dim) shape[static_cast<std::size_t>(dim)] = view.shape[dim];
                return py::make_tuple(reinterpret_cast<std::uintptr_t>(view.data), std::move(shape),
                                      static_cast<int>(view.dtype));
            },
            py::arg("tensor"), "(address, shape, dtype) of a tensor that the core can use in place; else None.")
        .def("calls", &bound_calls, py::arg("communicator"),
             "allreduce and start_allreduce of that communicator, as functions; see _core.pyi.");
}
