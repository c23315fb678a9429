#include "register.hpp"

PYBIND11_MODULE(_core, module) {
    module.doc() = "The native core of Ring Notebook: ring memory, communicators and their collectives.";
    register_errors(module);
    register_types(module);
    register_settings(module);
    register_frames(module);
    register_bytes(module);
    register_paths(module);
    register_memory(module);
    register_link(module);
    register_devices(module);
    register_communicator(module);
    register_tensors(module);
    register_foreign(module);
}
