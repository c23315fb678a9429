// Collectives on the tensors themselves: the calls that small operations spend their time in. They bypass pybind11's
// conversion of arguments, which takes longer than such an operation.
#include <optional>
#include <utility>

#include "arguments.hpp"
#include "register.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "tensor_reader.hpp"
#include "work_handle.hpp"

namespace py = pybind11;
using ring::Communicator;

namespace {

// Runs `body`, and raises what it throws.
template <class Body>
PyObject* guarded(Body&& body) {
    try {
        return body();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (...) {
        py::detail::try_translate_exceptions();
    }
    return nullptr;
}

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

// The arguments of a call, in their order, as a description of what it asks for.
class TensorCall {
   public:
    enum { kCommunicator, kTensors, kOutputs, kOp, kPrescale, kPostscale, kName, kTimeout, kArguments };

    // False for what the reader does not know, and for lists that are long or share memory.
    bool read(const TensorReader& reader, PyObject* const* arguments, Py_ssize_t count) {
        if (count != kArguments) throw py::type_error("this takes 8 arguments");
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
    ring::Piece pieces_[kMostTensors];
};

PyObject* allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        TensorCall given;
        if (!given.read(*py::cast<const TensorReader*>(self), arguments, count)) Py_RETURN_FALSE;
        auto& communicator = *py::cast<Communicator*>(arguments[TensorCall::kCommunicator]);
        {
            std::optional<py::gil_scoped_release> nogil;
            if (!communicator.allreduce_small(given.call(), given.timeout(), signal_check(),
                                              [&] { nogil.emplace(); })) {
                ring::Request request = given.request();
                nogil.emplace();
                const ring::Spending spending(communicator.recorder());
                const auto work = communicator.run(std::move(request), given.timeout(), signal_check());
                communicator.recorder().add_waited(work->waited_since(spending.begin()));
                work->get();
            }
        }
        Py_RETURN_TRUE;
    });
}

PyObject* start_allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        TensorCall given;
        if (!given.read(*py::cast<const TensorReader*>(self), arguments, count)) Py_RETURN_NONE;
        auto communicator = py::cast<std::shared_ptr<Communicator>>(arguments[TensorCall::kCommunicator]);
        std::shared_ptr<ring::Work> work;
        // What has a name matches by that.
        if (!given.call().name.empty() || !communicator->start_small(given.call(), given.timeout(), work)) {
            ring::Request request = given.request();
            const py::gil_scoped_release nogil;
            work = communicator->start(std::move(request), given.timeout());
        }
        return py::cast(WorkHandle{std::move(communicator), std::move(work)}).release().ptr();
    });
}

PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef allreduce_method = {
    "allreduce", fast_call(allreduce), METH_FASTCALL,
    "allreduce(self: TensorReader, communicator: Communicator, tensors: object, outputs: object, op: int, "
    "prescale: float, postscale: float, name: str, timeout: float) -> bool\n\n"
    "Reduce a tensor, or a list of some. False, and nothing is done, for what cannot be read so."};
PyMethodDef start_allreduce_method = {
    "start_allreduce", fast_call(start_allreduce), METH_FASTCALL,
    "start_allreduce(self: TensorReader, communicator: Communicator, tensors: object, outputs: object, op: int, "
    "prescale: float, postscale: float, name: str, timeout: float) -> Work | None\n\n"
    "The same, not waited for. None, and nothing is done, for what cannot be read so."};

void add_method(const py::object& type, PyMethodDef& method) {
    const auto descriptor =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
    if (!descriptor) throw py::error_already_set();
    type.attr(method.ml_name) = descriptor;
}

}  // namespace

void register_tensor_calls(py::module_& module) {
    const py::class_<TensorReader> reader =
        py::class_<TensorReader>(module, "TensorReader", "Reads a framework's tensors; see tensor_reader.hpp.")
            .def(py::init<py::tuple, py::object>(), py::arg("types"), py::arg("is_neg"))
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
                py::arg("tensor"),
                "(address, shape, dtype) of one that the core can work on where it lies; else None.");
    add_method(reader, allreduce_method);
    add_method(reader, start_allreduce_method);
}
