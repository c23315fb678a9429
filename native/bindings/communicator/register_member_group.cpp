#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "communicator/released.hpp"
#include "register.hpp"
#include "ring/communicator/member_group.hpp"

namespace py = pybind11;
using ring::Communicator;
using ring::MemberCard;
using ring::MemberGroup;

namespace {

// (offset of the block, id, number for tags)
using MemberCardTuple = std::tuple<std::uint64_t, std::uint64_t, int>;

}  // namespace

void register_member_group(py::module_& module) {
    py::class_<MemberGroup>(module, "MemberGroup", "A group that its members make without the other ranks.")
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
