#include <pybind11/stl.h>

#include "register.hpp"
#include "ring/transport/link.hpp"

namespace py = pybind11;

void register_link(py::module_& module) {
    py::class_<ring::Link, std::shared_ptr<ring::Link>>(module, "Link", "Moves bytes between ranks of different hosts.")
        .def("drain", &ring::Link::drain, py::call_guard<py::gil_scoped_release>());
    module.def(
        "mpi_link",
        [](const std::string& module_path, std::uint64_t comm, std::uint64_t byte, std::size_t handle_bytes,
           int any_source, int any_tag, int tag_limit) {
            return ring::make_mpi_link({module_path.c_str(), comm, byte, handle_bytes, any_source, any_tag, tag_limit});
        },
        py::arg("module_path"), py::arg("comm"), py::arg("byte"), py::arg("handle_bytes"), py::arg("any_source"),
        py::arg("any_tag"), py::arg("tag_limit"),
        "A link through the MPI that the extension module at `module_path` has loaded.");
    module.def("reserve_memory_link", &ring::reserve_memory_link, py::arg("domain"),
               "Room for a link among all ranks of a domain; one rank calls it and tells the offset to the others.");
    module.def("memory_link", &ring::make_memory_link, py::arg("domain"), py::arg("offset"),
               "A link among all ranks of a domain, through the room that one of them has reserved.");
}
