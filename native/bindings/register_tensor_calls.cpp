// Collectives on the tensors themselves: the calls that small operations spend their time in. They bypass pybind11's
// conversion of arguments, which takes longer than such an operation.
#include <optional>
#include <utility>

#include "arguments.hpp"
#include "register.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/small_allreduce.hpp"
#include "tensor_reader.hpp"

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

enum { kCommunicator, kTensor, kOutput, kOp, kPrescale, kPostscale, kName, kTimeout, kArguments };

PyObject* allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != kArguments) throw py::type_error("allreduce takes 8 arguments");
        const auto& reader = *py::cast<const TensorReader*>(self);
        auto& communicator = *py::cast<Communicator*>(arguments[kCommunicator]);
        TensorView input, output;
        if (!reader.read(arguments[kTensor], input)) Py_RETURN_FALSE;
        if (arguments[kOutput] == arguments[kTensor]) {
            output = input;
        } else if (!reader.read(arguments[kOutput], output) || output.count != input.count ||
                   output.dtype != input.dtype) {
            Py_RETURN_FALSE;
        }
        const ring::SmallAllreduce call{input.data,
                                        output.data,
                                        input.count,
                                        input.dtype,
                                        op_argument(arguments[kOp]),
                                        number_argument(arguments[kPrescale]),
                                        number_argument(arguments[kPostscale]),
                                        input.dims,
                                        input.shape,
                                        text_argument(arguments[kName])};
        const double timeout = number_argument(arguments[kTimeout]);
        bool done = false;
        {
            std::optional<py::gil_scoped_release> nogil;
            done = communicator.allreduce_small(call, timeout, signal_check(), [&] { nogil.emplace(); });
        }
        return PyBool_FromLong(done);
    });
}

PyMethodDef allreduce_method = {
    "allreduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(allreduce)), METH_FASTCALL,
    "allreduce(self: TensorReader, communicator: Communicator, tensor: object, output: object, op: int, "
    "prescale: float, postscale: float, name: str, timeout: float) -> bool\n\n"
    "Reduce a small tensor at once. False, and nothing is done, where that takes the ordinary way."};

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
}
