#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "arguments.hpp"
#include "register.hpp"
#include "ring/communicator/communicator.hpp"

namespace py = pybind11;
using ring::Communicator;

namespace {

struct Mail {
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<ring::Message> message;

    // Seconds of it before the other side had come.
    double wait(double timeout) const {
        std::int64_t waited = 0;
        if (!message->done()) {
            const ring::Spending spending(communicator->recorder());
            const py::gil_scoped_release nogil;
            communicator->wait(*message, timeout, signal_check());
            waited = message->waited_since(spending.begin());
            communicator->recorder().add_waited(waited);
        }
        message->get();
        return 1e-9 * static_cast<double>(waited);
    }
};

}  // namespace

void register_messages(py::module_& module) {
    py::class_<Mail>(module, "Message", "One message from a rank to another.")
        .def("wait", &Mail::wait, py::arg("timeout") = 0.0)
        .def("done", [](const Mail& self) { return self.message->done(); })
        .def("source", [](const Mail& self) { return self.message->source(); });
    module.def(
        "send",
        [](const std::shared_ptr<Communicator>& communicator, std::uintptr_t data, std::uint64_t count, int dtype,
           int to, int tag, double timeout, bool attended) {
            const ring::DType type = dtype_argument(dtype);
            const py::gil_scoped_release nogil;
            return Mail{communicator, communicator->send(to, tag, reinterpret_cast<const void*>(data), count, type,
                                                         timeout, attended)};
        },
        py::arg("communicator"), py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("to"), py::arg("tag"),
        py::arg("timeout"), py::arg("attended"));
    module.def(
        "receive",
        [](const std::shared_ptr<Communicator>& communicator, std::uintptr_t data, std::uint64_t count, int dtype,
           int source, int tag, double timeout, bool attended) {
            const ring::DType type = dtype_argument(dtype);
            const py::gil_scoped_release nogil;
            return Mail{communicator, communicator->receive(source, tag, reinterpret_cast<void*>(data), count, type,
                                                            timeout, attended)};
        },
        py::arg("communicator"), py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("source"), py::arg("tag"),
        py::arg("timeout"), py::arg("attended"));
}
