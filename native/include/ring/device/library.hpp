// A library that is opened at run time, and functions found in it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "ring/device/driver.hpp"

namespace ring {

// The library at `path`; where that is empty, the one of that name that the process has loaded, else the one at
// `otherwise`, else the one that the system finds. Throws DeviceError with the loader's message.
inline void* open_library(const char* name, const std::string& path, const std::string& otherwise = "") {
    void* library = path.empty() ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    const std::string& file = path.empty() ? otherwise : path;
    if (library == nullptr) library = dlopen(file.empty() ? name : file.c_str(), RTLD_NOW);
    if (library == nullptr) {
        const char* why = dlerror();
        throw DeviceError(std::string(name) + " cannot be loaded: " + (why != nullptr ? why : "no reason was given"));
    }
    return library;
}

template <class Function>
void find_function(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) throw DeviceError(std::string("the library has no ") + name + "; a newer one is needed");
}

}  // namespace ring
