// Collectives on the tensors themselves: the calls that small operations spend their time in. They bypass pybind11's
// conversion of arguments, which takes longer than such an operation.
#include <memory>
#include <optional>
#include <utility>

#include "arguments.hpp"
#include "guarded.hpp"
#include "register.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "tensors/tensor_reader.hpp"
#include "tensors/tensor_work.hpp"

namespace py = pybind11;
using ring::Communicator;

namespace {

double number_argument(PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
}

ring::ReduceOp op_argument(PyObject* value) {
    const long number = PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return enum_argument<ring::ReduceOp>("op", static_cast<int>(number), ring::kReduceOps);
}

std::string_view text_argument(PyObject* value) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == nullptr) throw py::error_already_set();
    return {text, static_cast<std::size_t>(length)};
}

constexpr Py_ssize_t kMostTensors = 32;

// What the calls of one communicator work with. A capsule that is the `self` of both holds it: arguments of pybind11's
// types would each have to be looked up.
struct Calls {
    py::object owner;
    const TensorReader* reader;
    std::shared_ptr<Communicator> communicator;
};

constexpr const char* kCalls = "ring_notebook._core.TensorReader.calls";

const Calls& calls_of(PyObject* self) { return *static_cast<const Calls*>(PyCapsule_GetPointer(self, kCalls)); }

// The arguments of a call, in their order, as a description of what it asks for.
class TensorCall {
   public:
    enum { kTensors, kOutputs, kOp, kPrescale, kPostscale, kName, kTimeout, kArguments };

    // False for what the reader does not know, and for lists that are long or share memory.
    bool read(const TensorReader& reader, PyObject* const* arguments, Py_ssize_t count, Py_ssize_t others = 0) {
        if (count != kArguments + others) throw py::type_error("this takes other arguments; see _core.pyi");
        if (!read_tensors(reader, arguments[kTensors], arguments[kOutputs])) return false;
        call_.op = op_argument(arguments[kOp]);
        call_.prescale = number_argument(arguments[kPrescale]);
        call_.postscale = number_argument(arguments[kPostscale]);
        call_.name = text_argument(arguments[kName]);
        timeout_ = number_argument(arguments[kTimeout]);
        return true;
    }
    const ring::SmallAllreduce& call() const { return call_; }
    // The same for an operation of any size.
    ring::Request request() const {
        ring::Request request;
        request.kind = ring::OpKind::Allreduce;
        request.dtype = call_.dtype;
        request.op = call_.op;
        request.prescale = call_.prescale;
        request.postscale = call_.postscale;
        request.pieces.assign(pieces_, pieces_ + call_.tensors);
        request.shape.assign(call_.shape, call_.shape + call_.dims);
        request.layout = call_.layout;
        request.name = call_.name;
        return request;
    }
    double timeout() const { return timeout_; }

   private:
    // One tensor, or a list or tuple of some of one dtype.
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

    // Whether two tensors are written to one memory, which is an error that the ordinary way tells.
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
            if (!communicator.allreduce_small(given.call(), given.timeout(), signal_check(),
                                              [&] { nogil.emplace(); })) {
                ring::Request request = given.request();
                nogil.emplace();
                const ring::Spending spending(communicator.recorder());
                const auto work = communicator.run(std::move(request), given.timeout(), signal_check());
                communicator.note_caller(*work, spending.begin());
                work->get();
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
        // What has a name matches by that.
        if (!given.call().name.empty() || !calls.communicator->start_small(given.call(), given.timeout(), work)) {
            ring::Request request = given.request();
            const py::gil_scoped_release nogil;
            work = calls.communicator->start(std::move(request), given.timeout());
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
    "Reduce a tensor, or a list of some. False, and nothing is done, for what cannot be read so."};
PyMethodDef start_allreduce_method = {
    "start_allreduce", fast_call(start_allreduce), METH_FASTCALL,
    "The same, not waited for. None, and nothing is done, for what cannot be read so."};

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

void register_tensor_calls(py::module_& module) {
    register_tensor_work(module);
    py::class_<TensorReader>(module, "TensorReader", "Reads a framework's tensors; see tensor_reader.hpp.")
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
            py::arg("tensor"), "(address, shape, dtype) of one that the core can work on where it lies; else None.")
        .def("calls", &bound_calls, py::arg("communicator"),
             "allreduce and start_allreduce of that communicator, as functions; see _core.pyi.");
}
