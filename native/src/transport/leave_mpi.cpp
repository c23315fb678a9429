// Takes MPI from a module in a forked process, by its table of imported functions: a module of mpi4py keeps for itself
// whether it finalizes MPI at exit, and asks MPI alone whether there is something to finalize.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "ring/base/errors.hpp"
#include "ring/transport/link.hpp"

namespace ring {
namespace {

using Symbol = ElfW(Sym);
using Relocation = ElfW(Rela);

constexpr const char* kAsked = "MPI_Initialized";

int never_initialized(int* flag) {
    *flag = 0;
    return 0;  // MPI_SUCCESS
}

void store(void** place, void* value) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    void* const begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(place) & ~(page - 1));
    // The linker may have made the table read-only. It is not written again: all of this happens at exit.
    if (mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) throw Error(std::string("leave_mpi: ") + strerror(errno));
    *place = value;
}

}  // namespace

void leave_mpi(const char* module_path) {
    void* const library = dlopen(module_path, RTLD_LAZY | RTLD_NOLOAD);
    link_map* map = nullptr;
    if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0)
        throw Error(std::string("leave_mpi: MPI is not loaded by ") + module_path);
    const Symbol* symbols = nullptr;
    const char* strings = nullptr;
    const Relocation* tables[2] = {nullptr, nullptr};  // of calls, and of addresses that are taken
    std::size_t bytes[2] = {0, 0};
    for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
        const auto address = reinterpret_cast<const void*>(entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB) symbols = static_cast<const Symbol*>(address);
        if (entry->d_tag == DT_STRTAB) strings = static_cast<const char*>(address);
        if (entry->d_tag == DT_JMPREL) tables[0] = static_cast<const Relocation*>(address);
        if (entry->d_tag == DT_RELA) tables[1] = static_cast<const Relocation*>(address);
        if (entry->d_tag == DT_PLTRELSZ) bytes[0] = entry->d_un.d_val;
        if (entry->d_tag == DT_RELASZ) bytes[1] = entry->d_un.d_val;
    }
    for (int table = 0; table < 2; ++table)
        for (std::size_t i = 0; tables[table] != nullptr && i < bytes[table] / sizeof(Relocation); ++i) {
            const Relocation& entry = tables[table][i];
            if (std::strcmp(strings + symbols[ELF64_R_SYM(entry.r_info)].st_name, kAsked) == 0)
                store(reinterpret_cast<void**>(map->l_addr + entry.r_offset),
                      reinterpret_cast<void*>(&never_initialized));
        }
}

}  // namespace ring
