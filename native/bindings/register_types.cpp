// The core's enums as enums of Python, and what it knows of element types.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "register.hpp"
#include "ring/base/dtypes_and_ops.hpp"

namespace py = pybind11;
using ring::DType;

namespace {

template <class Enum>
py::object declare(py::module_& module, const char* name, const char* doc) {
    py::native_enum<Enum> type(module, name, "enum.IntEnum", doc);
    for (int number = 0; number < ring::kValues<Enum>; ++number) {
        std::string upper = ring::to_string(static_cast<Enum>(number));
        for (char& one : upper) one = static_cast<char>(std::toupper(one));
        type.value(upper.c_str(), static_cast<Enum>(number));
    }
    type.finalize();
    return module.attr(name);
}

py::object property(int (*get)(int dtype), const char* doc) {
    return py::module_::import("builtins").attr("property")(py::cpp_function(get), py::none(), py::none(), doc);
}

// What the letters of Python's struct module mean; their sizes depend on the machine.
std::optional<ring::Numbers> numbers_of(char code) {
    const auto is_one_of = [&](std::string_view codes) { return codes.find(code) != std::string_view::npos; };
    if (is_one_of("bhilq")) return ring::Numbers::Signed;
    if (is_one_of("BHILQ")) return ring::Numbers::Unsigned;
    if (is_one_of("efd")) return ring::Numbers::Float;
    if (code == '?') return ring::Numbers::Bool;
    return std::nullopt;
}

// The number of an element type; none where the core lacks the type.
std::optional<int> dtype_of(std::string_view format, py::ssize_t bytes) {
    if (!format.empty() && std::string_view("@=<").find(format.front()) != std::string_view::npos)
        format.remove_prefix(1);
    const auto numbers = format.size() == 1 ? numbers_of(format.front()) : std::nullopt;
    for (int number = 0; numbers && number < ring::kValues<DType>; ++number) {
        const ring::DTypeFacts& facts = ring::facts(static_cast<DType>(number));
        if (facts.numbers == *numbers && facts.bytes == static_cast<std::size_t>(bytes)) return number;
    }
    return std::nullopt;
}

// (address, shape, number of the dtype or None, format, readonly)
py::tuple buffer_info(const py::buffer& data) {
    const py::buffer_info info = data.request();
    py::ssize_t expected = info.itemsize;
    for (py::ssize_t dim = info.ndim; dim-- > 0;) {
        const auto i = static_cast<std::size_t>(dim);
        if (info.shape[i] > 1 && info.strides[i] != expected)
            throw py::type_error("the memory is not C-contiguous; pass a contiguous copy");
        expected *= info.shape[i];
    }
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(info.ptr), py::tuple(py::cast(info.shape)),
                          dtype_of(info.format, info.itemsize), info.format, info.readonly);
}

}  // namespace

void register_types(py::module_& module) {
    py::object dtype = declare<DType>(module, "DType", "Element types that the core reduces.");
    dtype.attr("itemsize") = property(
        [](int number) { return static_cast<int>(ring::item_size(dtype_argument(number))); }, "Bytes per element.");
    dtype.attr("xla") = property([](int number) { return ring::facts(dtype_argument(number)).xla; },
                                 "Its number in XLA's C interface, -1 where that has none.");
    declare<ring::Device>(module, "Device", "Kinds of device whose memory a tensor may lie in.");
    declare<ring::ReduceOp>(module, "ReduceOp", "Reductions, with the numbers of Horovod's constants.");
    module.def(
        "buffer_info", &buffer_info, py::arg("data"),
        "(address, shape, number of the dtype or None, format, readonly) of an object with the buffer protocol.");
}
