/* Stops a thread before its n-th access to some pages of memory: for test_stopped_threads.py. x86-64 only.
 *
 * The pages are made inaccessible. At each access, the handler of SIGSEGV opens them for one instruction: it sets the
 * processor's trap flag, and the handler of SIGTRAP closes them again. At the n-th access they stay open, and the
 * handler waits. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { MOST_PAGES = 4, PAGE_BYTES = 4096, TRAP_FLAG = 0x100 };

static char *pages[MOST_PAGES];
static int page_count;
static uint64_t accesses, stop_before, longest_ms;
static pid_t watched;

uint64_t is_stopped, may_go_on;

static void protect(int protection) {
    for (int i = 0; i < page_count; i++)
        mprotect(pages[i], PAGE_BYTES, protection);
}

static void wait_to_go_on(void) {
    const struct timespec pause = {0, 1000000};
    __atomic_store_n(&is_stopped, 1, __ATOMIC_SEQ_CST);
    for (uint64_t ms = 0; ms < longest_ms && !__atomic_load_n(&may_go_on, __ATOMIC_SEQ_CST); ms++)
        nanosleep(&pause, NULL);
}

static void on_access(int number, siginfo_t *info, void *context) {
    bool is_ours = false;
    for (int i = 0; i < page_count; i++)
        is_ours |= (uintptr_t)info->si_addr - (uintptr_t)pages[i] < PAGE_BYTES;
    if (!is_ours || gettid() != watched) {
        signal(number, SIG_DFL); /* a crash like any other, when the instruction runs again */
        return;
    }
    protect(PROT_READ | PROT_WRITE);
    if (++accesses == stop_before) {
        wait_to_go_on();
    } else {
        ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
    }
}

static void on_step(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    protect(PROT_NONE);
}

/* Watch the calling thread. It stops before this access, until `may_go_on` is set, or that time is over. */
void watch(void *const *addresses, int count, uint64_t access, uint64_t most_ms) {
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = on_access;
    sigaction(SIGSEGV, &action, NULL);
    action.sa_sigaction = on_step;
    sigaction(SIGTRAP, &action, NULL);
    for (int i = 0; i < count; i++)
        pages[i] = (char *)((uintptr_t)addresses[i] & ~(uintptr_t)(PAGE_BYTES - 1));
    page_count = count;
    accesses = 0;
    stop_before = access, longest_ms = most_ms, watched = gettid();
    protect(PROT_NONE);
}

void unwatch(void) { protect(PROT_READ | PROT_WRITE); }
