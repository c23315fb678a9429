// The part of xla/ffi/api/c_api.h that a handler of XLA's foreign function interface uses. The interface is stable:
// fields are only added at the ends of its structs, each of which begins with its size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ring::foreign::xla {

enum { kMetadataExtension = 1, kExecuteStage = 3, kStringAttribute = 4, kTokenType = 17, kAborted = 10 };
// The version whose fields these are; later ones of the same major version accept it.
constexpr int kMajorVersion = 0, kMinorVersion = 1;

struct Extension {
    std::size_t struct_size;
    int type;
    Extension* next;
};
struct Version {
    std::size_t struct_size;
    Extension* extension;
    int major_version, minor_version;
};
struct Metadata {
    std::size_t struct_size;
    Version version;
    std::uint32_t traits;
};
struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};
struct Error;
struct ErrorArguments {
    std::size_t struct_size;
    Extension* extension;
    const char* message;
    int code;
};
struct Api {
    std::size_t struct_size;
    Extension* extension;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorArguments*);
};
struct Buffer {
    std::size_t struct_size;
    Extension* extension;
    int dtype;
    void* data;
    std::int64_t rank;
    std::int64_t* dims;
};
struct Text {
    const char* data;
    std::size_t length;
};
struct Buffers {
    std::size_t struct_size;
    Extension* extension;
    std::int64_t size;
    int* types;
    Buffer** buffers;
};
struct Attributes {
    std::size_t struct_size;
    Extension* extension;
    std::int64_t size;
    int* types;
    Text** names;
    void** values;
};
struct CallFrame {
    std::size_t struct_size;
    Extension* extension;
    const Api* api;
    void* context;
    int stage;
    Buffers inputs;
    Buffers outputs;
    Attributes attributes;
};

}  // namespace ring::foreign::xla
