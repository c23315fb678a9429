#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "register.hpp"
#include "ring/communicator/communicator.hpp"
#include "ring/communicator/member_group.hpp"
#include "ring/communicator/named_lane.hpp"
#include "ring/device/devices.hpp"
#include "work_handle.hpp"

namespace py = pybind11;
using ring::Communicator;
using ring::MemberCard;
using ring::MemberGroup;
using ring::Request;
using ring::RingMemory;

namespace {

// Where the elements from a rank go: (address, elements)
using TargetTuple = std::tuple<std::uintptr_t, std::uint64_t>;
// (input address, output address, elements)
using PieceTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>;

const std::tuple<int, int, std::uintptr_t> kHost{static_cast<int>(ring::Device::Cpu), 0, 0};

// The bytes that an operation produced, alive as long as a buffer refers to them.
struct Output {
    std::shared_ptr<ring::Work> work;
};

// The same on a device.
struct DeviceOutput {
    std::shared_ptr<ring::DeviceMemory> memory;
};

// (kind of device, which one of that kind, stream)
using DeviceTuple = std::tuple<int, int, std::uintptr_t>;

void set_device(Request& request, const DeviceTuple& device) {
    request.device = device_argument(std::get<0>(device));
    request.device_index = std::get<1>(device);
    request.stream = reinterpret_cast<void*>(std::get<2>(device));
}

Request make_request(ring::OpKind kind, int dtype, const DeviceTuple& device, std::vector<PieceTuple> pieces,
                     std::vector<std::int64_t> shape, std::string name) {
    Request request;
    request.kind = kind;
    request.dtype = dtype_argument(dtype);
    set_device(request, device);
    for (const auto& [input, output, count] : pieces)
        request.pieces.push_back(
            {reinterpret_cast<const std::byte*>(input), reinterpret_cast<std::byte*>(output), count});
    request.shape = std::move(shape);
    request.name = std::move(name);
    return request;
}

std::vector<ring::Target> targets_argument(const std::vector<TargetTuple>& targets) {
    std::vector<ring::Target> all;
    for (const auto& [address, count] : targets) all.push_back({reinterpret_cast<std::byte*>(address), count});
    return all;
}

// The number of operations that one call of the user starts, and the first of them, once it exists.
using CallTuple = std::tuple<int, std::optional<WorkHandle>>;

WorkHandle submit(const std::shared_ptr<Communicator>& self, Request request, bool blocking, double timeout,
                  const CallTuple& call = {1, std::nullopt}) {
    const auto& [operations, first] = call;
    request.operations = operations;
    request.site = call_site(*self);
    const py::gil_scoped_release nogil;
    if (!blocking) return {self, self->start(std::move(request), timeout, first ? first->work : nullptr)};
    // The owner of the tensors waits for the work: the tensors must outlive a kernel, also one that fails.
    if (request.device == ring::Device::Cuda) return {self, self->enqueue(std::move(request), timeout)};
    return {self, self->call(std::move(request), timeout, signal_check())};
}

// (begin ns, end ns, phase, operation, name, sequence, bytes, group, rank that came last)
py::list recorded(const Communicator& self, bool end) {
    py::list all;
    for (const ring::Event& event : end ? self.recorder().stop() : self.recorder().take())
        all.append(py::make_tuple(event.begin, event.end, ring::to_string(event.phase), ring::to_string(event.kind),
                                  std::string(event.name), event.sequence, event.bytes, event.group, event.last));
    return all;
}

py::list activity(const Communicator& self) {
    py::list all;
    for (const ring::RankActivity& one : self.activity()) {
        py::dict entry;
        entry["rank"] = one.rank;
        entry["state"] = ring::to_string(one.state);
        entry["operation"] = one.header.sequence == 0 ? "" : ring::to_string(one.header.kind);
        entry["name"] = python_text(one.header.name);  // which the rank may be writing now
        entry["sequence"] = one.header.sequence;
        entry["seconds"] = one.seconds;
        entry["arrivals"] = one.arrivals;
        all.append(entry);
    }
    return all;
}

// (offset of the block, id, number for tags)
using MemberCardTuple = std::tuple<std::uint64_t, std::uint64_t, int>;

void register_member_group(py::module_& module) {
    py::class_<MemberGroup>(module, "MemberGroup", "A group that its members create without the other ranks.")
        .def(py::init<std::shared_ptr<Communicator>, std::vector<int>>(), py::arg("parent"), py::arg("members"),
             py::call_guard<py::gil_scoped_release>())
        .def("card",
             [](const MemberGroup& self) {
                 const MemberCard card = self.card();
                 return MemberCardTuple{card.block, card.id, card.number};
             })
        .def(
            "enter",
            [](MemberGroup& self, const std::vector<MemberCardTuple>& tuples) {
                std::vector<MemberCard> cards;
                for (const auto& [block, id, number] : tuples) cards.push_back({block, id, number});
                const py::gil_scoped_release nogil;
                return released_unlocked(self.enter(cards));
            },
            py::arg("cards"));
}

struct Mail {
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<ring::Message> message;

    // Returns the seconds of the wait before the other side came.
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

}  // namespace

void register_operation_log(py::module_& module) {
    py::class_<ring::OperationLog, std::shared_ptr<ring::OperationLog>>(
        module, "OperationLog", "The last operations of this rank; see ring/group/operation_log.hpp.")
        .def(py::init<const std::string&>(), py::arg("path"))
        .def_property_readonly("path", &ring::OperationLog::path)
        .def_static(
            "parse",
            [](const py::bytes& log) {
                py::list all;
                for (const ring::LoggedOperation& one : ring::OperationLog::parse(log))
                    all.append(py::make_tuple(one.kind, python_text(one.name), one.what, one.bytes, one.group, one.size,
                                              one.generation, one.sequence, one.called, one.arrived, one.ended,
                                              ring::to_string(one.state), python_text(one.line)));
                return all;
            },
            py::arg("log"), "What a log holds: for each operation the fields of operation_log.Operation after `rank`.")
        .def(
            "note",
            [](ring::OperationLog& self, const std::string& text, const std::string& file, const std::string& function,
               std::uint64_t line, std::uint32_t size, std::uint32_t generation) {
                const std::uint32_t site = line == 0 ? 0 : self.add_site(file, function, line);
                self.note(text, {0, size, generation}, site);
            },
            py::arg("text"), py::arg("file"), py::arg("function"), py::arg("line"), py::arg("size"),
            py::arg("generation"));
}

void register_communicator(py::module_& module) {
    register_operation_log(module);
    py::class_<Output>(module, "Output", py::buffer_protocol(), "The bytes that an operation produced.")
        .def_buffer([](Output& self) {
            ring::Result& result = self.work->result;
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(result.data.get()),
                                   static_cast<py::ssize_t>(result.bytes));
        });

    py::class_<DeviceOutput>(module, "DeviceOutput", "The memory of a device that an operation wrote its result to.")
        .def_property_readonly(
            "address", [](const DeviceOutput& self) { return reinterpret_cast<std::uintptr_t>(self.memory->data()); })
        .def_property_readonly("nbytes", [](const DeviceOutput& self) { return self.memory->bytes(); });

    py::class_<WorkHandle>(module, "Work", "One operation under way.")
        .def("wait", &WorkHandle::wait, py::arg("timeout") = 0.0)
        .def("done", &WorkHandle::done)
        .def("order", &WorkHandle::order, py::arg("stream"), py::arg("timeout") = 0.0)
        .def("ended", [](const WorkHandle& self) { return !self.work || self.work->done(); })
        .def("launched", [](const WorkHandle& self) { return !self.work || self.work->launched(); })
        .def("must_keep", [](const WorkHandle& self) { return self.work && self.work->done() && self.work->must_keep; })
        .def("device_output",
             [](const WorkHandle& self) {
                 if (!self.result().on_device)
                     throw ring::InvalidArgument("the operation has produced nothing on a device");
                 return DeviceOutput{self.work->result.on_device};
             })
        .def("output",
             [](const WorkHandle& self) {
                 self.result();
                 return Output{self.work};
             })
        .def("counts", [](const WorkHandle& self) { return self.result().counts; })
        .def("placed", [](const WorkHandle& self) { return self.result().placed; })
        .def("last_joined", [](const WorkHandle& self) { return self.result().last_joined; });

    py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator",
                                                            "The collectives of one group in one generation.")
        .def_static(
            "open",
            [](std::shared_ptr<RingMemory> ring_memory, std::vector<int> ranks, std::vector<int> local, int index,
               std::uint64_t generation, std::shared_ptr<ring::Link> link, std::vector<int> host_of,
               std::vector<int> addresses, double timeout, std::uint64_t run, std::int64_t disruptions,
               const ring::Options& options, std::shared_ptr<ring::Devices> devices,
               std::shared_ptr<ring::OperationLog> log) {
                Communicator::Setup setup{std::move(ring_memory),
                                          std::move(ranks),
                                          std::move(local),
                                          std::move(host_of),
                                          std::move(addresses),
                                          std::move(link),
                                          index,
                                          generation,
                                          run,
                                          disruptions,
                                          options,
                                          std::move(devices),
                                          std::move(log)};
                const py::gil_scoped_release nogil;
                return released_unlocked(Communicator::open(std::move(setup), timeout, signal_check()));
            },
            py::arg("ring_memory"), py::arg("ranks"), py::arg("local"), py::arg("index"), py::arg("generation"),
            py::arg("link") = nullptr, py::arg("host_of") = std::vector<int>{},
            py::arg("addresses") = std::vector<int>{}, py::arg("timeout") = 0.0, py::arg("run") = 0,
            py::arg("disruptions") = 0, py::arg("options") = ring::Options{}, py::arg("devices") = nullptr,
            py::arg("log") = nullptr, "Open a generation; every member calls it with the same numbers.")
        .def_property_readonly("size", &Communicator::size)
        .def_property_readonly("index", &Communicator::index)
        .def_property_readonly("ranks", &Communicator::ranks)
        .def_property_readonly("host_of", &Communicator::host_of)
        .def_property_readonly("aborted", &Communicator::aborted)
        .def_property_readonly("closed", &Communicator::closed)
        .def_property_readonly("disruptions", &Communicator::disruptions)
        .def("match_in_order", &Communicator::match_in_order)
        .def("device_transport", &Communicator::device_transport)
        .def(
            "start",
            [](const std::shared_ptr<Communicator>& self, std::string_view operation, std::vector<PieceTuple> pieces,
               std::vector<std::int64_t> shape, int dtype, const DeviceTuple& device, std::string name, bool blocking,
               double timeout, const CallTuple& call, int root, int op, double prescale, double postscale,
               std::uint64_t layout, const std::vector<TargetTuple>& targets, std::vector<std::int64_t> splits) {
                Request request = make_request(operation_argument(operation), dtype, device, std::move(pieces),
                                               std::move(shape), std::move(name));
                request.root = root;
                request.op = op_argument(op);
                request.prescale = prescale;
                request.postscale = postscale;
                request.layout = layout;
                request.targets = targets_argument(targets);
                request.splits = std::move(splits);
                return submit(self, std::move(request), blocking, timeout, call);
            },
            py::arg("operation"), py::arg("pieces"), py::arg("shape"), py::arg("dtype"), py::arg("device"),
            py::arg("name"), py::arg("blocking"), py::arg("timeout"), py::arg("call") = CallTuple{1, std::nullopt},
            py::arg("root") = -1, py::arg("op") = static_cast<int>(ring::ReduceOp::Sum), py::arg("prescale") = 1.0,
            py::arg("postscale") = 1.0, py::arg("layout") = 0, py::arg("targets") = std::vector<TargetTuple>{},
            py::arg("splits") = std::vector<std::int64_t>{})
        .def(
            "barrier",
            [](const std::shared_ptr<Communicator>& self, std::string name, bool blocking, double timeout) {
                return submit(self, make_request(ring::OpKind::Barrier, 0, kHost, {}, {}, std::move(name)), blocking,
                              timeout);
            },
            py::arg("name"), py::arg("blocking"), py::arg("timeout"))
        .def(
            "commit",
            [](Communicator& self, std::string name, std::uint64_t newest, double timeout,
               const py::object& guard) -> py::object {
                py::object interrupt;
                const ring::Interruption check = signal_check(interrupt);
                const std::uint32_t site = call_site(self);
                std::uint64_t agreed = 0;
                try {
                    const py::gil_scoped_release nogil;
                    agreed = self.commit(std::move(name), newest, timeout, check, site);
                } catch (...) {
                    if (interrupt)
                        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.ptr())), interrupt.ptr());
                    throw;
                }
                // Before the interpreter checks for signals again.
                if (!guard.is_none()) guard.attr("held") = true;
                if (!guard.is_none() && newest != 0) guard.attr("agreed") = agreed;
                return interrupt ? interrupt : py::none();
            },
            py::arg("name"), py::arg("newest"), py::arg("timeout"), py::arg("guard"),
            "Set guard.held if the commit succeeds, and guard.agreed to the least `newest` of all ranks if this rank's "
            "is not 0; return the Python exception that interrupted this rank in it, or None.")
        .def(
            "join",
            [](const std::shared_ptr<Communicator>& self, double timeout) {
                return submit(self, make_request(ring::OpKind::Join, 0, kHost, {}, {}, ""), true, timeout);
            },
            py::arg("timeout"))
        .def("abort", &Communicator::abort, py::arg("reason"), py::call_guard<py::gil_scoped_release>())
        .def("close",
             [](Communicator& self) {
                 const py::gil_scoped_release nogil;
                 self.close(signal_check());
             })
        .def("activity", &activity)
        .def("named_wait",
             [](const Communicator& self) -> py::object {
                 const std::optional<ring::NamedWait> wait = self.named().wait();
                 if (!wait) return py::none();
                 return py::make_tuple(ring::to_string(wait->header.kind), std::string(wait->header.name),
                                       wait->seconds, wait->missing);
             })
        .def("named_counts",
             [](const Communicator& self) {
                 const ring::NamedLane::Counts counts = self.named().counts();
                 return py::make_tuple(counts.rounds, counts.names, counts.operations, counts.gates, counts.messages,
                                       counts.bytes);
             })
        .def("counts",
             [](const Communicator& self) {
                 const Communicator::Counts counts = self.counts();
                 py::list sent;
                 for (const auto& one : counts.sent) sent.append(py::make_tuple(one.messages, one.bytes));
                 return py::make_tuple(counts.operations, counts.gates, std::move(sent));
             })
        .def("seconds_spent", [](const Communicator& self) { return 1e-9 * self.recorder().spent(); })
        .def("bytes_posted", [](const Communicator& self) { return self.recorder().posted(); })
        .def("seconds_waited", [](const Communicator& self) { return 1e-9 * self.recorder().waited(); })
        .def(
            "record", [](const Communicator& self, std::size_t capacity) { self.recorder().start(capacity); },
            py::arg("capacity"))
        .def("recorded", &recorded, py::arg("end") = true);
    register_member_group(module);
    register_messages(module);
}
