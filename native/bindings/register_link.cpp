#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "register.hpp"
#include "ring/transport/link.hpp"
#include "ring/transport/tcp_link.hpp"

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
    module.def(
        "leave_mpi", [](const std::string& module_path) { ring::leave_mpi(module_path.c_str()); },
        py::arg("module_path"),
        "In a process that a rank has forked: make the extension module at `module_path` see MPI as not initialized.");
    using Released = py::call_guard<py::gil_scoped_release>;
    py::class_<ring::TcpLink, ring::Link, std::shared_ptr<ring::TcpLink>>(
        module, "TcpLink", "A link over TCP among ranks 0 to `size` - 1; the caller makes the connections.")
        .def(py::init<int>(), py::arg("size"))
        .def_property_readonly("attention_fd", &ring::TcpLink::attention_fd,
                               "A descriptor that is readable when `take_wanted` and `flush` must be called.")
        .def("take_wanted", &ring::TcpLink::take_wanted, Released(), "Ranks that need a connection.")
        .def("flush", &ring::TcpLink::flush, Released(),
             "Send what can be sent; return whether something is left: then call it again soon.")
        .def("connected", &ring::TcpLink::connected, py::arg("rank"), py::arg("socket"), Released(),
             "Take over the connection to `rank`, a descriptor.")
        .def("unreachable", &ring::TcpLink::unreachable, py::arg("rank"), py::arg("why"), Released(),
             "Report that `rank` cannot be connected: transfers with it raise RingError.")
        .def(
            "post",
            [](ring::TcpLink& link, int to, int tag, const py::bytes& data) {
                const auto text = static_cast<std::string_view>(data);
                const py::gil_scoped_release released;
                link.post(to, tag, text);
            },
            py::arg("to"), py::arg("tag"), py::arg("data"),
            "Send a message whose tag is at least `first_free_tag`; does not wait.")
        .def(
            "take",
            [](ring::TcpLink& link, int tag) -> std::optional<std::pair<int, py::bytes>> {
                std::optional<std::pair<int, std::string>> found;
                {
                    const py::gil_scoped_release released;
                    found = link.take(tag);
                }
                if (!found) return std::nullopt;
                return std::pair{found->first, py::bytes(found->second)};
            },
            py::arg("tag"), "The source and the data of a posted message that has arrived; None when there is none.")
        .def(
            "sent",
            [](ring::TcpLink& link) {
                std::vector<std::tuple<int, double, std::uint64_t>> all;
                for (const auto& one : link.sent()) all.emplace_back(one.rank, one.seconds, one.bytes);
                return all;
            },
            Released(),
            "Ranks that this one has a connection to; seconds in which data to them was on its way; bytes they have.")
        .def_property_readonly_static("first_free_tag", [](const py::object&) { return ring::TcpLink::kFirstFree; });
}
