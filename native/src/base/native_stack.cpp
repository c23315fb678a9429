#include "ring/base/native_stack.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "ring/base/no_signals.hpp"

namespace ring {
namespace {

constexpr int kMost = 160;       // calls; the outermost ones may be cut off
constexpr int kOfTheSignal = 2;  // calls: the handler, and the kernel's return trampoline

// A handler gets no argument of ours, so its data is one object per process that is never destroyed.
struct Asked {
    int fd = -1;
    void (*before)(int) = nullptr;
    sem_t taken;
    std::atomic<bool> busy{false};
    int count = 0;
    void* calls[kMost];
};
Asked* asked = nullptr;
std::atomic<bool> installed{false};

// Records addresses only. Naming them takes the loader's lock, for which this thread must not wait: the thread that
// holds the lock may wait for the GIL, which this thread holds.
void on_signal(int signum) {
    const int error = errno;
    const bool first = !asked->busy.exchange(true, std::memory_order_acquire);
    if (first) asked->count = backtrace(asked->calls, kMost);
    if (asked->before) asked->before(signum);
    if (first) sem_post(&asked->taken);
    errno = error;
}

std::string name_of(const char* symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> plain{abi::__cxa_demangle(symbol, nullptr, nullptr, &status),
                                                            &std::free};
    return status == 0 ? plain.get() : symbol;
}

std::string line_of(void* address) {
    Dl_info found{};
    if (dladdr(address, &found) == 0 || found.dli_fname == nullptr) return "  ? of ?\n";
    // Where a function has no name, `addr2line` finds its line by the offset.
    char offset[32];
    std::snprintf(offset, sizeof offset, "+0x%zx",
                  static_cast<std::size_t>(static_cast<char*>(address) - static_cast<char*>(found.dli_fbase)));
    return "  " + (found.dli_sname ? name_of(found.dli_sname) : offset) + " of " + found.dli_fname + "\n";
}

void write_all(int fd, const std::string& text) {
    for (std::size_t done = 0; done < text.size();) {
        const ssize_t some = write(fd, text.data() + done, text.size() - done);
        if (some < 0 && errno == EINTR) continue;
        if (some <= 0) return;  // the disk is full: the reader sees an incomplete stack
        done += static_cast<std::size_t>(some);
    }
}

void write_stacks() {
    for (;;) {
        while (sem_wait(&asked->taken) != 0) {
        }
        std::string text = "Native stack (most recent call first):\n";
        for (int i = kOfTheSignal; i < asked->count; ++i) {
            // The recorded address is that of the instruction after the call, which may belong to the next function.
            char* address = static_cast<char*>(asked->calls[i]);
            text += line_of(i == kOfTheSignal ? address : address - 1);
        }
        asked->busy.store(false, std::memory_order_release);
        write_all(asked->fd, text + "End of native stack\n");
    }
}

}  // namespace

void report_native_stack(int signum, int fd) {
    if (installed.exchange(true)) return;
    asked = new Asked;
    asked->fd = fd;
    sem_init(&asked->taken, 0, 0);
    void* once[1];
    backtrace(once, 1);  // loads the unwinder, because a handler must not load it
    {
        const NoSignals none;
        std::thread(write_stacks).detach();
    }
    struct sigaction action{};
    struct sigaction before{};
    sigaction(signum, nullptr, &before);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN && !(before.sa_flags & SA_SIGINFO))
        asked->before = before.sa_handler;
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(signum, &action, nullptr);
}

}  // namespace ring
