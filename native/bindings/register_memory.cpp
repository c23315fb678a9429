#include <pybind11/stl.h>
#include <unistd.h>

#include <utility>

#include "register.hpp"
#include "ring/group/membership.hpp"
#include "ring/memory/freed_memory.hpp"
#include "ring/memory/memory.hpp"
#include "ring/memory/memory_left.hpp"
#include "ring/memory/staging.hpp"

namespace py = pybind11;
using ring::Region;
using ring::RingMemory;

void register_memory(py::module_& module) {
    py::class_<Region>(module, "Region", py::buffer_protocol(), "A block of ring memory; freed with its last view.")
        .def_property_readonly("address",
                               [](const Region& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_property_readonly("nbytes", &Region::bytes)
        .def("__len__", &Region::bytes)
        .def_buffer([](Region& self) {
            return py::buffer_info(static_cast<std::uint8_t*>(self.data()), static_cast<py::ssize_t>(self.bytes()));
        });

    py::class_<RingMemory, std::shared_ptr<RingMemory>>(module, "RingMemory", "The ring memory of one host.")
        .def_static("create", &RingMemory::create, py::arg("local_rank"), py::arg("local_size"), py::arg("arena") = 0)
        .def_static("attach", &RingMemory::attach, py::arg("local_rank"), py::arg("local_size"), py::arg("pid"),
                    py::arg("fd"), py::arg("token"))
        .def("share", &RingMemory::share, py::arg("local_rank"), "For another rank of this process, as a thread.")
        .def_property_readonly("local_rank", &RingMemory::local_rank)
        .def_property_readonly("local_size", &RingMemory::local_size)
        .def_property_readonly("fd", &RingMemory::fd)
        .def_property_readonly("token", &RingMemory::token)
        .def_property_readonly("allocated", &RingMemory::allocated)
        .def("trim", &RingMemory::trim)
        .def("drop_dead", &RingMemory::drop_dead, "Give the ring memory of ranks that have died back to the machine.")
        .def("dead", &RingMemory::dead, py::arg("local_rank"))
        .def_property_readonly("cores", &RingMemory::cores,
                               "Processors that the ranks of the host may run on together.")
        .def(
            "leave_run",
            [](const RingMemory& self, std::uint64_t run) {
                if (!self.owned()) return;  // a forked process is no rank of it
                self.slot(self.local_rank()).left_run.store(run, std::memory_order_seq_cst);
            },
            py::arg("run"),
            "Tell ranks that open a generation of this run from now on that this rank will not join it.")
        .def(
            "agree_on_generation",
            [](RingMemory& self, std::vector<int> candidates, std::uint64_t last, std::uint64_t run, double timeout) {
                const ring::GenerationCall call{std::move(candidates), last, run};
                const py::gil_scoped_release nogil;
                return ring::agree_on_generation(self, call, timeout, signal_check());
            },
            py::arg("candidates"), py::arg("last"), py::arg("run"), py::arg("timeout"),
            "The number of the next generation of these local ranks; see membership.hpp.")
        .def(
            "allocate",
            [](std::shared_ptr<RingMemory> self, std::size_t bytes) {
                const py::gil_scoped_release nogil;
                return std::make_unique<Region>(std::move(self), bytes);
            },
            py::arg("bytes"));

    py::class_<ring::Staging>(module, "Staging", "Chooses how segments are written; see staging.hpp.")
        .def(py::init([](const ring::Options& options) { return ring::Staging(options.staging); }), py::arg("options"))
        .def("past_cache", &ring::Staging::past_cache, py::arg("bytes"))
        .def("took", &ring::Staging::took, py::arg("past_cache"), py::arg("bytes"), py::arg("ns"));

    module.def("keep_freed_memory", &ring::keep_freed_memory,
               "Have malloc keep freed memory for later requests; False where it cannot. See freed_memory.hpp.");
    module.def("return_freed_memory", &ring::return_freed_memory, py::call_guard<py::gil_scoped_release>(),
               "Give all freed memory of malloc back to the kernel.");
    module.def("memory_left", &ring::memory_left,
               "Bytes that the machine and the limits of this process's control groups have left.");
    module.def("control_group_left", &ring::control_group_left, py::arg("root"), py::arg("group"),
               "Bytes that a control group has left, or 2**64 - 1; see memory_left.hpp.");
}
