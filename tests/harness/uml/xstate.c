/* Preloaded into user-mode Linux. Its kernel keeps the state of vector registers in 2,696 bytes and sets it again;
   on a CPU with a larger state (AMX), the host refuses an incomplete one: "ptrace set fp regs failed, errno = 14".
   So this library completes the state with the current values of the process. */

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

enum { ROOM = 1 << 16, FEATURES = 512, LEAF = 13 };

/* The bits of the features whose registers lie in the first `size` bytes, cached because CPUID is slow in a VM. */
static uint64_t features_within(size_t size) {
    static uint64_t known;
    static size_t known_for;
    if (known_for != size) {
        known = 3; /* x87 and SSE have fixed places */
        known_for = size;
        for (unsigned bit = 2; bit < 63; bit++) {
            unsigned length, offset, flags, unused;
            __cpuid_count(LEAF, bit, length, offset, flags, unused);
            if (length && (size_t)offset + length <= size)
                known |= (uint64_t)1 << bit;
        }
    }
    return known;
}

long ptrace(enum __ptrace_request request, ...) {
    static long (*next)(enum __ptrace_request, ...);
    static _Thread_local char whole[ROOM] __attribute__((aligned(64)));
    if (!next)
        next = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
    va_list list;
    va_start(list, request);
    int pid = va_arg(list, int);
    void *address = va_arg(list, void *);
    void *data = va_arg(list, void *);
    va_end(list);
    if ((request != PTRACE_SETREGSET && request != PTRACE_GETREGSET) || (uintptr_t)address != NT_X86_XSTATE)
        return next(request, pid, address, data);

    struct iovec *part = data;
    struct iovec all = {whole, sizeof whole};
    long failed = next(PTRACE_GETREGSET, pid, address, &all);
    if (failed)
        return failed;
    size_t size = part->iov_len < all.iov_len ? part->iov_len : all.iov_len;
    if (request == PTRACE_GETREGSET) {
        memcpy(part->iov_base, whole, size);
        part->iov_len = size;
        return 0;
    }
    uint64_t present, wanted, known = features_within(size);
    memcpy(&present, whole + FEATURES, sizeof present);
    memcpy(whole, part->iov_base, size);
    memcpy(&wanted, whole + FEATURES, sizeof wanted);
    wanted = (wanted & known) | (present & ~known);
    memcpy(whole + FEATURES, &wanted, sizeof wanted);
    return next(request, pid, address, &all);
}
