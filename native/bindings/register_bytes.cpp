// Numbers as bytes, in memory that Python gives by its address.
#include <cstdint>

#include "register.hpp"
#include "ring/kernels/kernels.hpp"

namespace py = pybind11;

namespace {

template <class T>
T* memory_at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void pack(std::uintptr_t out, std::uintptr_t values, std::uintptr_t left, std::uintptr_t now_left, std::size_t count) {
    const py::gil_scoped_release nogil;
    ring::kernels().pack(memory_at<void>(out), memory_at<const float>(values), memory_at<const float>(left),
                         memory_at<float>(now_left), count);
}

void unpack(std::uintptr_t out, std::uintptr_t data, std::size_t count, bool adds) {
    const py::gil_scoped_release nogil;
    ring::kernels().unpack(memory_at<float>(out), memory_at<const void>(data), count, adds);
}

}  // namespace

void register_bytes(py::module_& module) {
    module.def("packed_size", &ring::Bytes::size, py::arg("count"), "Bytes that `pack` makes of so many numbers.");
    module.def("pack", &pack, py::arg("out"), py::arg("values"), py::arg("left"), py::arg("now_left"), py::arg("count"),
               "Numbers as bytes, by addresses, of which `left` and `now_left` may be 0; see kernels/kernels.hpp.");
    module.def("unpack", &unpack, py::arg("out"), py::arg("data"), py::arg("count"), py::arg("adds"),
               "The numbers of such bytes, by addresses; `adds` adds them to those in `out`.");
}
