// Python's settings in the core: options, the instruction set of the kernels, the stack on a signal.
#include <string>
#include <utility>

#include "register.hpp"
#include "ring/base/errors.hpp"
#include "ring/base/native_stack.hpp"
#include "ring/base/options.hpp"
#include "ring/base/wait.hpp"
#include "ring/kernels/kernels.hpp"

namespace py = pybind11;

namespace {

constexpr std::pair<const char*, ring::DType> kWires[] = {
    {"", ring::DType::Float32}, {"float16", ring::DType::Float16}, {"bfloat16", ring::DType::BFloat16}};
constexpr std::pair<const char*, ring::StagingWay> kStaging[] = {
    {"auto", ring::StagingWay::Auto}, {"cache", ring::StagingWay::Cache}, {"memory", ring::StagingWay::Memory}};

}  // namespace

void register_settings(py::module_& module) {
    const ring::Options defaults;
    py::class_<ring::Options>(module, "Options", "How the core works in a generation; see ring_notebook/config.py.")
        .def(py::init([](const std::string& wire, const std::string& staging, std::size_t inline_bytes,
                         std::size_t segment_bytes, double spin, double stall_warning, double standstill,
                         std::uint64_t fusion_threshold) {
                 ring::Options options;
                 options.wire = chosen("Options: wire", wire, kWires);
                 options.staging = chosen("Options: staging", staging, kStaging);
                 options.inline_bytes = inline_bytes;
                 options.segment_bytes = segment_bytes;
                 options.spin = spin;
                 options.stall_warning = stall_warning;
                 options.standstill = standstill;
                 options.fusion_threshold = fusion_threshold;
                 return options;
             }),
             py::kw_only(), py::arg("wire") = "", py::arg("staging") = "auto",
             py::arg("inline_bytes") = defaults.inline_bytes, py::arg("segment_bytes") = defaults.segment_bytes,
             py::arg("spin") = defaults.spin, py::arg("stall_warning") = defaults.stall_warning,
             py::arg("standstill") = defaults.standstill, py::arg("fusion_threshold") = defaults.fusion_threshold);

    module.def("isa", [] { return ring::kernels().isa; }, "Instruction set of the kernels in use.");
    module.def(
        "select_isa", [](const std::string& isa) { return ring::select_kernels(isa).isa; }, py::arg("isa"),
        "Use the kernels of an instruction set, or the best for '' or where the processor lacks it; returns its name.");
    module.def("hold_deadlines", &ring::hold_deadlines, py::arg("hold"),
               "Stop the time limits of all operations, until it is called with false.");
    module.def("report_native_stack", &ring::report_native_stack, py::arg("signum"), py::arg("fd"),
               "On a signal, also write the native stack of the signalled thread to a file.");
}
