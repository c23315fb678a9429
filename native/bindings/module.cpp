#include "register.hpp"
#include "ring/kernels/reduce.hpp"

PYBIND11_MODULE(_core, module) {
    module.doc() = "The native core of Ring Notebook: ring memory, communicators and their collectives.";
    module.def("isa", [] { return ring::kernels().isa; }, "Instruction set of the kernels in use.");
    register_errors(module);
    register_memory(module);
    register_link(module);
    register_communicator(module);
}
