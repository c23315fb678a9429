// The core's pure functions: the path of an operation, the owner of each chunk, and the steps of a ring.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>

#include "register.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/inter_host/link_model.hpp"
#include "ring/collectives/inter_host/plans.hpp"
#include "ring/collectives/paths.hpp"
#include "ring/communicator/fusion.hpp"
#include "ring/group/host_group.hpp"
#include "ring/group/standstill.hpp"

namespace py = pybind11;
using ring::Header;

namespace {

// (joins called, [(name, joins before it)])
using MemberNews = std::pair<std::uint64_t, std::vector<std::pair<std::string, std::uint64_t>>>;

// (rank, [(key, ranks needed, text)])
using StandingRank = std::pair<int, std::vector<std::tuple<std::uint64_t, std::uint32_t, std::string>>>;

Header make_header(const std::string& operation, int dtype, int op, int device, bool is_inline, bool input_in_ring,
                   bool output_in_ring, int root, int tensors, std::uint64_t count, double prescale, double postscale) {
    Header header;
    header.kind = operation_argument(operation);
    header.dtype = dtype_argument(dtype);
    header.op = op_argument(op);
    header.device = device_argument(device);
    header.is_inline = is_inline ? 1 : 0;
    header.input = input_in_ring ? 0 : ring::kNowhere;
    header.output = output_in_ring ? 0 : ring::kNowhere;
    header.root = root;
    header.tensors = tensors;
    header.count = count;
    header.prescale = prescale;
    header.postscale = postscale;
    return header;
}

}  // namespace

void register_paths(py::module_& module) {
    py::class_<Header>(module, "Header", "The part of a rank's header of an operation that decides the path.")
        .def(py::init(&make_header), py::arg("operation"), py::kw_only(),
             py::arg("dtype") = static_cast<int>(ring::DType::Float32),
             py::arg("op") = static_cast<int>(ring::ReduceOp::Sum),
             py::arg("device") = static_cast<int>(ring::Device::Cpu), py::arg("is_inline") = false,
             py::arg("input_in_ring") = false, py::arg("output_in_ring") = false, py::arg("root") = 0,
             py::arg("tensors") = 1, py::arg("count") = 1, py::arg("prescale") = 1.0, py::arg("postscale") = 1.0);

    py::class_<ring::Path>(module, "Path",
                           "One way to carry an operation out, with its costs; see collectives/paths.hpp.")
        .def_property_readonly("operation", [](const ring::Path& self) { return ring::to_string(self.kind); })
        .def_readonly("name", &ring::Path::name)
        .def_readonly("between_hosts", &ring::Path::between_hosts)
        .def_readonly("gates", &ring::Path::gates)
        .def_readonly("bytes", &ring::Path::bytes)
        .def_readonly("messages", &ring::Path::messages);

    module.def("paths", &ring::all_paths, "All paths, in the order in which they are tried.");
    module.def(
        "layout_hash",
        [](const std::vector<std::vector<std::int64_t>>& shapes) {
            std::uint64_t hash = ring::kNoShapes;
            for (const auto& shape : shapes) hash = ring::add_shape(hash, shape.data(), static_cast<int>(shape.size()));
            return hash;
        },
        py::arg("shapes"), "A hash of 64 bits: equal where tensors of the same shapes are fused in the same order.");
    module.def(
        "choose",
        [](const std::vector<Header>& headers, int hosts, const std::string& devices) {
            ring::Topology topology{{}, hosts};
            if (!devices.empty())
                topology.devices = devices == "nccl" ? ring::Topology::Devices::Nccl : ring::Topology::Devices::Host;
            while (topology.ranks.size() < headers.size())
                topology.ranks.push_back(static_cast<int>(topology.ranks.size()));
            return ring::choose(headers, topology);
        },
        py::arg("headers"), py::arg("hosts"), py::arg("devices") = "",
        "The path of the operation that ranks 0, 1, ... on so many hosts have posted these headers for, where they "
        "have "
        "agreed on \"nccl\" or \"host\" for tensors on devices.");
    module.def(
        "fuse",
        [](const std::vector<std::vector<Header>>& operations, std::uint64_t threshold) {
            std::vector<ring::Ready> ready;
            std::vector<int> ranks;
            for (const std::vector<Header>& headers : operations) {
                ready.push_back({{}, headers});
                ranks.resize(headers.size());
            }
            return ring::plan_fusion(ready, ranks, threshold);
        },
        py::arg("operations"), py::arg("threshold"),
        "Of operations that all ranks have posted these headers for by name, which are carried out as one.");
    module.def(
        "ready_names",
        [](std::size_t size, const std::vector<std::vector<MemberNews>>& rounds) {
            ring::NameTable table(size);
            std::vector<std::vector<std::string>> all;
            for (const auto& round : rounds) {
                for (std::size_t member = 0; member < round.size(); ++member) {
                    ring::News news;
                    news.joins = round[member].first;
                    for (const auto& [name, joins] : round[member].second) {
                        ring::Post post;
                        ring::set_name(post.header, name);
                        post.joins = joins;
                        news.posts.push_back(post);
                    }
                    table.add(member, news);
                }
                all.emplace_back();
                for (const ring::Ready& one : table.take_ready()) all.back().push_back(one.key.name);
            }
            return all;
        },
        py::arg("size"), py::arg("rounds"),
        "What is carried out after each round in which ranks 0, 1, ... tell how often they have called join, and the "
        "names that they have posted, with how often all had joined before.");
    module.def(
        "standstill",
        [](const std::vector<std::vector<StandingRank>>& hosts) {
            ring::StandingRanks all;
            for (const auto& host : hosts) {
                ring::StandingRanks there;
                for (const auto& [rank, awaited] : host) {
                    ring::Standstill one;
                    for (const auto& [key, needed, text] : awaited) one.add(key, needed, text);
                    there.add(rank, one);
                }
                all.add_encoded(there.encode());
            }
            return all.mismatch();
        },
        py::arg("hosts"),
        "What ranks raise that stand still: by host, (rank, [(key, ranks needed, text)]); empty if one can continue.");
    module.def(
        "chunk_range",
        [](std::uint64_t count, int size, int index, std::size_t item) {
            const ring::Range range = ring::chunk_range(count, size, index, item);
            return std::make_pair(range.begin, range.end);
        },
        py::arg("count"), py::arg("size"), py::arg("index"), py::arg("item"),
        "The elements [begin, end) that rank `index` of `size` owns of `count` elements of `item` bytes.");
    module.def(
        "ring_plan",
        [](int hosts, int host) {
            py::list hops;
            for (const ring::Hop& hop : ring::ring_plan(hosts, host))
                hops.append(py::make_tuple(hop.send, hop.receive, hop.reduce));
            return hops;
        },
        py::arg("hosts"), py::arg("host"), "(piece sent, piece received, whether it is added) for every hop.");
    module.def(
        "dissemination_plan",
        [](int hosts, int host) {
            py::list rounds;
            for (const ring::Round& round : ring::dissemination_plan(hosts, host))
                rounds.append(py::make_tuple(round.to, round.from, round.blocks));
            return rounds;
        },
        py::arg("hosts"), py::arg("host"), "(host sent to, host received from, blocks) for every round.");
    module.def(
        "doubling_plan",
        [](int hosts, int host) {
            static constexpr const char* kKinds[] = {"give", "take", "both", "give result", "take result"};
            py::list exchanges;
            for (const ring::Exchange& one : ring::doubling_plan(hosts, host))
                exchanges.append(py::make_tuple(kKinds[static_cast<int>(one.kind)], one.peer));
            return exchanges;
        },
        py::arg("hosts"), py::arg("host"), "(what is done, the other host) for every exchange.");
    module.def(
        "goes_with_headers",
        [](int hosts, std::uint64_t bytes) {
            return bytes <= ring::inline_bytes(ring::Options{}, hosts) &&
                   ring::goes_with_headers(static_cast<std::uint64_t>(hosts), bytes);
        },
        py::arg("hosts"), py::arg("bytes"),
        "Whether a sum of so many bytes travels with the headers of its operation.");
    module.def("agree_directly", &ring::agree_directly, py::arg("hosts"),
               "Whether each leader sends its headers to each other one; see link_model.hpp.");
}
