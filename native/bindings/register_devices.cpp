// The devices of a rank, a report about them, and the pure functions about them.
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "register.hpp"
#include "ring/base/errors.hpp"
#include "ring/collectives/device/device_card.hpp"
#include "ring/collectives/device/nccl_reduction.hpp"
#include "ring/device/devices.hpp"

namespace py = pybind11;
using ring::Devices;

namespace {

constexpr double kAtOnce = 1e-9;  // seconds: as a limit 0 would mean never

constexpr std::pair<const char*, ring::DeviceChoice> kChoices[] = {
    {"auto", ring::DeviceChoice::Auto}, {"nccl", ring::DeviceChoice::Nccl}, {"host", ring::DeviceChoice::Host}};

// The versions of the driver and of NCCL and the names of the devices, or why they cannot be loaded.
py::dict report(Devices& self) {
    py::dict found;
    try {
        const auto driver = self.driver();
        int version = 0, count = 0;
        driver->check(driver->cuDriverGetVersion(&version), "cuDriverGetVersion");
        driver->check(driver->cuDeviceGetCount(&count), "cuDeviceGetCount");
        py::list names;
        for (int i = 0; i < count; ++i) {
            int device = 0;
            char name[96] = {};
            driver->check(driver->cuDeviceGet(&device, i), "cuDeviceGet");
            driver->check(driver->cuDeviceGetName(name, sizeof name, device), "cuDeviceGetName");
            names.append(std::string(name));
        }
        found["driver"] = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
        found["devices"] = names;
    } catch (const ring::DeviceError& error) {
        found["driver_error"] = std::string(error.what());
    }
    try {
        const auto nccl = self.nccl();
        int version = 0;
        nccl->check(nccl->ncclGetVersion(&version), "ncclGetVersion", nullptr);
        found["nccl"] = ring::nccl_version_text(version);
    } catch (const ring::DeviceError& error) {
        found["nccl_error"] = std::string(error.what());
    }
    return found;
}

// (why it refuses or "", host, index of the device, its uuid, version of NCCL)
using DeviceCardTuple = std::tuple<std::string, std::string, int, std::string, int>;

std::string verdict(const std::vector<DeviceCardTuple>& said, const std::vector<int>& ranks) {
    std::vector<ring::DeviceCard> cards;
    for (const auto& [why, host, index, uuid, nccl] : said) {
        ring::DeviceCard card;
        if (!why.empty()) card.refuse(why);
        host.copy(card.host, sizeof card.host - 1);
        uuid.copy(reinterpret_cast<char*>(card.device.bytes), sizeof card.device.bytes);
        card.index = index;
        card.nccl = nccl;
        cards.push_back(card);
    }
    return ring::why_not_nccl(cards, ranks);
}

}  // namespace

void register_devices(py::module_& module) {
    py::class_<Devices, std::shared_ptr<Devices>>(module, "Devices",
                                                  "The devices of this rank; see ring/device/devices.hpp.")
        .def(py::init([](const std::string& choice, std::string cuda, std::string nccl, std::string nccl_otherwise,
                         std::string refusal, bool shares, double abort_limit, double connect_limit) {
                 return std::make_shared<Devices>(
                     Devices::Settings{chosen("Devices: choice", choice, kChoices), std::move(cuda), std::move(nccl),
                                       std::move(nccl_otherwise), std::move(refusal), shares,
                                       std::max(abort_limit, kAtOnce), std::max(connect_limit, kAtOnce)});
             }),
             py::kw_only(), py::arg("choice") = "auto", py::arg("cuda_library") = "", py::arg("nccl_library") = "",
             py::arg("nccl_otherwise") = "", py::arg("refusal") = "", py::arg("shares") = false,
             py::arg("abort_limit") = Devices::Settings{}.abort_limit,
             py::arg("connect_limit") = Devices::Settings{}.connect_limit)
        .def("report", &report)
        .def_property_readonly("given_up", &Devices::given_up);

    module.def(
        "why_not_nccl", &verdict, py::arg("cards"), py::arg("ranks"),
        "Why a group whose ranks send these cards goes through host memory; empty where NCCL moves its tensors.");
}
