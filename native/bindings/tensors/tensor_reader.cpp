#include "tensors/tensor_reader.hpp"

#include <utility>

#include "ring/base/errors.hpp"

namespace py = pybind11;

namespace {

// Null where the framework has no such function, or one of another ABI.
auto read_function(const py::handle& type) {
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    const dlpack::ExchangeApi* api = nullptr;
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) != 0)
        api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    while (api != nullptr && api->major != dlpack::kMajor) api = api->previous;
    return api == nullptr ? nullptr : api->tensor_from_object;
}

bool known_dtype(const dlpack::Tensor& tensor, ring::DType& dtype) {
    if (tensor.lanes != 1) return false;
    switch (tensor.code << 8 | tensor.bits) {
        case dlpack::kUInt << 8 | 8:
            dtype = ring::DType::UInt8;
            return true;
        case dlpack::kInt << 8 | 8:
            dtype = ring::DType::Int8;
            return true;
        case dlpack::kInt << 8 | 16:
            dtype = ring::DType::Int16;
            return true;
        case dlpack::kInt << 8 | 32:
            dtype = ring::DType::Int32;
            return true;
        case dlpack::kInt << 8 | 64:
            dtype = ring::DType::Int64;
            return true;
        case dlpack::kFloat << 8 | 16:
            dtype = ring::DType::Float16;
            return true;
        case dlpack::kBfloat << 8 | 16:
            dtype = ring::DType::BFloat16;
            return true;
        case dlpack::kFloat << 8 | 32:
            dtype = ring::DType::Float32;
            return true;
        case dlpack::kFloat << 8 | 64:
            dtype = ring::DType::Float64;
            return true;
        case dlpack::kBool << 8 | 8:
            dtype = ring::DType::Bool;
            return true;
        default:
            return false;
    }
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

}  // namespace

TensorReader::TensorReader(py::tuple types, py::object is_neg, bool flat)
    : read_(read_function(types[0])), types_(std::move(types)), is_neg_(std::move(is_neg)), flat_(flat) {
    if (read_ == nullptr)
        throw ring::InvalidArgument("tensors of this framework cannot be read by DLPack's C functions, version 1");
}

// The negative bit is a sign that memory does not hold. Only the framework knows it.
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
    if (read_(tensor, &raw) != 0) {  // no memory, or none that DLPack knows
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
