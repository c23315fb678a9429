// MPI point to point, found in whatever MPI mpi4py has loaded, so that one binary serves MPICH, Open MPI and a site's
// own. The types below are those of the two ABIs: handles are int (MPICH) or pointers (Open MPI).
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/base/errors.hpp"
#include "ring/transport/link.hpp"

namespace ring {
namespace {

constexpr int kSuccess = 0;
constexpr std::int64_t kAbandonedLimit = 100'000'000;  // ns
// Large enough for the MPI_Status of every implementation.
struct Status {
    alignas(16) unsigned char bytes[256];
};

template <class Handle>
class MpiLink : public Link {
   public:
    explicit MpiLink(const Mpi& mpi)
        : comm_(from_bits(mpi.comm)),
          byte_(from_bits(mpi.byte)),
          any_source_(mpi.any_source),
          any_tag_(mpi.any_tag),
          tag_limit_(mpi.tag_limit) {
        // RTLD_DEFAULT would not find it: Python loads extension modules RTLD_LOCAL.
        library_ = dlopen(mpi.module_path, RTLD_LAZY | RTLD_NOLOAD);
        if (library_ == nullptr) throw Error(std::string("link: MPI is not loaded by ") + mpi.module_path);
        load("MPI_Isend", isend_);
        load("MPI_Irecv", irecv_);
        load("MPI_Test", test_);
        load("MPI_Iprobe", iprobe_);
        load("MPI_Get_count", get_count_);
        load("MPI_Cancel", cancel_);
        load("MPI_Request_free", request_free_);
    }
    ~MpiLink() override {
        // MPI may write there until the process ends.
        if (!abandoned_->empty()) static_cast<void>(abandoned_.release());
        dlclose(library_);
    }

    Transfer send(int to, int tag, const void* data, std::size_t bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return begin("MPI_Isend", true, [&](Handle* request) {
            return isend_(data, static_cast<int>(bytes), byte_, to, tag, comm_, request);
        });
    }

    Transfer receive(int from, int tag, void* data, std::size_t bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        forget_abandoned();
        return begin("MPI_Irecv", false, [&](Handle* request) {
            return irecv_(data, static_cast<int>(bytes), byte_, from, tag, comm_, request);
        });
    }

    bool done(Transfer& transfer) override {
        if (transfer == 0) return true;
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pending_.find(transfer);
        int flag = 0;
        Status status;
        check(test_(&found->second.request, &flag, &status), "MPI_Test");
        if (flag == 0) return false;
        pending_.erase(found);
        transfer = 0;
        return true;
    }

    void cancel(Transfer& transfer, std::shared_ptr<const void> keep) noexcept override {
        if (transfer == 0) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        auto node = pending_.extract(transfer);
        Pending& pending = node.mapped();
        if (pending.is_send) {
            // Not every MPI can cancel a send. No rank receives this one, because its tag belongs to an ended
            // generation.
            request_free_(&pending.request);
        } else {
            // Open MPI cannot cancel a receive that is matched with a large message: it ends when the sender enters MPI
            // again, which may be never.
            cancel_(&pending.request);
            if (!is_over(pending.request)) {
                pending.keep = std::move(keep);
                abandoned_->insert(std::move(node));
            }
        }
        transfer = 0;
    }

    bool probe(int tag, int& source, std::size_t& bytes) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return probe_locked(tag, source, tag, bytes);
    }

    void drain() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        int source = 0, tag = 0;
        std::size_t bytes = 0;
        while (probe_locked(any_tag_, source, tag, bytes)) {
            const auto nobody = std::make_shared<std::vector<std::byte>>(bytes);
            const Transfer transfer = begin("MPI_Irecv", false, [&](Handle* request) {
                return irecv_(nobody->data(), static_cast<int>(bytes), byte_, source, tag, comm_, request);
            });
            auto node = pending_.extract(transfer);
            node.mapped().keep = nobody;
            abandoned_->insert(std::move(node));
        }
        const std::int64_t deadline = monotonic_ns() + kAbandonedLimit;
        for (forget_abandoned(); !abandoned_->empty() && monotonic_ns() < deadline; forget_abandoned()) cpu_yield();
    }

    int tag_limit() const override { return tag_limit_; }

   private:
    struct Pending {
        Handle request{};
        bool is_send = false;
        std::shared_ptr<const void> keep = nullptr;  // owns the memory of an abandoned receive
    };
    using Transfers = std::map<Transfer, Pending>;

    // Notes a transfer and begins it. In this order, because a transfer under way cannot be cancelled safely.
    template <class Begin>
    Transfer begin(const char* what, bool is_send, Begin&& call) {
        const auto [noted, is_new] = pending_.emplace(++last_, Pending{{}, is_send});
        const int code = call(&noted->second.request);
        if (code != kSuccess) pending_.erase(noted);
        check(code, what);
        return last_;
    }

    // Whether MPI has completed a request; one that it does not know any more counts as completed.
    bool is_over(Handle& request) const noexcept {
        int flag = 0;
        Status status;
        return test_(&request, &flag, &status) != kSuccess || flag != 0;
    }

    void forget_abandoned() {
        for (auto one = abandoned_->begin(); one != abandoned_->end();)
            one = is_over(one->second.request) ? abandoned_->erase(one) : std::next(one);
    }

    static Handle from_bits(std::uint64_t bits) {
        Handle handle;
        std::memcpy(&handle, &bits, sizeof handle);  // MPICH's arrive sign-extended: the low half is the handle
        return handle;
    }

    // The status differs by ABI:
    // MPICH {int count_lo, count_hi_and_cancelled, MPI_SOURCE, MPI_TAG, ...}; Open MPI {int MPI_SOURCE, MPI_TAG, ...}.
    static constexpr bool kMpich = sizeof(Handle) == sizeof(int);

    bool probe_locked(int wanted, int& source, int& tag, std::size_t& bytes) {
        int flag = 0;
        Status status;
        check(iprobe_(any_source_, wanted, comm_, &flag, &status), "MPI_Iprobe");
        if (flag == 0) return false;
        int count = 0;
        check(get_count_(&status, byte_, &count), "MPI_Get_count");
        bytes = static_cast<std::size_t>(count);
        int words[4];
        std::memcpy(words, status.bytes, sizeof words);
        source = words[kMpich ? 2 : 0];
        tag = words[kMpich ? 3 : 1];
        return true;
    }

    template <class Function>
    void load(const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library_, name));
        if (function == nullptr) throw Error(std::string("link: the loaded MPI has no ") + name);
    }

    static void check(int code, const char* what) {
        if (code != kSuccess) throw Error(std::string("link: ") + what + " failed with code " + std::to_string(code));
    }

    void* library_ = nullptr;
    Handle comm_;
    Handle byte_;
    int any_source_, any_tag_;
    int tag_limit_;
    std::mutex mutex_;
    Transfers pending_;
    // Receives that were cancelled. On the heap, because they may outlive the link.
    std::unique_ptr<Transfers> abandoned_ = std::make_unique<Transfers>();
    Transfer last_ = 0;

    int (*isend_)(const void*, int, Handle, int, int, Handle, Handle*) = nullptr;
    int (*irecv_)(void*, int, Handle, int, int, Handle, Handle*) = nullptr;
    int (*test_)(Handle*, int*, Status*) = nullptr;
    int (*iprobe_)(int, int, Handle, int*, Status*) = nullptr;
    int (*get_count_)(const Status*, Handle, int*) = nullptr;
    int (*cancel_)(Handle*) = nullptr;
    int (*request_free_)(Handle*) = nullptr;
};

}  // namespace

std::shared_ptr<Link> make_mpi_link(const Mpi& mpi) {
    if (mpi.handle_bytes == sizeof(int)) return std::make_shared<MpiLink<int>>(mpi);
    if (mpi.handle_bytes == sizeof(void*)) return std::make_shared<MpiLink<void*>>(mpi);
    throw Error("link: MPI handles of " + std::to_string(mpi.handle_bytes) + " bytes are not known");
}

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
    // The linker may have made the table read-only. It stays writable: all of this happens at exit.
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
