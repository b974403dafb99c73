/* See explore.h. One thread, no locks: everything here is plain variables.
 *
 * The schedules form a graph, not a tree: a state that was seen before is not walked again. A state is the memory, the
 * rest of the bounds, the operations' results, and for each process a hash of everything that it has observed so far. A
 * process's program is deterministic, so its observations determine where it stands.
 *
 * Only accesses to words that some process writes are steps: the others commute with everything, and so do readings of
 * a clock that stands still. The explorer finds these words as it walks; when it finds one more, it walks all anew.
 *
 * With `stale_reads`, each word keeps all values that it had, in order (its modification order), and each process a
 * *view*: for each word, the oldest value that it may still read. A load may read any value from there on; with
 * acquire, it takes over what the writer of that value had in view. A compare and swap reads the newest value. A
 * sequentially consistent access also reads no value that is older than the last such access wrote. That is the
 * release-acquire fragment of C11 with read-modify-writes: all that the code uses.
 */
#undef _FORTIFY_SOURCE
#include "explore.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    REGIONS = 32,
    WORDS = 512,
    VALUES = 48, /* of one word, in one execution */
    DECISIONS = 1 << 14,
    STACK_BYTES = 1 << 18,
    OBSERVERS = EXPLORE_PROCESSES + 1,
};

typedef struct {
    uint64_t *base;
    size_t words;
    const char *name;
    uint64_t *content; /* at the start of an execution */
    int first;         /* word number; -1: not watched */
} Region;

typedef struct {
    uint64_t value;
    uint8_t view[WORDS];
} Written;

typedef enum { READY, FINISHED, CRASHED } Status;

typedef struct {
    void *stack_pointer;
    char *stack;
    Status status;
    int to_begin;        /* the operation whose first step is the next one; -1 */
    int begin_count;     /* and how many begin with it */
    bool at_step;        /* it begins no earlier, though it may read what nobody writes */
    bool starting;       /* on its way to its first step */
    uint64_t read_ns[2]; /* the first and the last clock reading since an operation began */
    uint64_t observed[2];
    uint32_t alone;
} Process;

int explore_planted;

static Region regions[REGIONS];
static int region_count, word_count;
static uint64_t *word_address[WORDS];
static bool ever_written[WORDS]; /* as this pass has found out by now */
static uint8_t counts[WORDS];    /* whether accesses to it are steps: ever_written, as it was when the pass began */
static bool found_another_written;
static bool is_step; /* the access that is under way */

static const ExploreProgram *program;
static ExploreBounds left; /* the rest of the bounds */
static ExploreBounds bounds;
static Process processes[EXPLORE_PROCESSES];
static int current = -1; /* the process that runs; -1: nothing is explored */
static void *main_stack_pointer;
static uint64_t clock_ns, first_clock_ns;

static ExploreOperation operations[EXPLORE_OPERATIONS];
static uint64_t operations_hash[2], memory_hash[2];

static uint8_t options[DECISIONS], chosen[DECISIONS];
static size_t decided, given; /* how many decisions this execution has made, and how many were made for it */
static size_t deepest;

static Written *written[WORDS]; /* VALUES each; only with stale reads */
static int newest[WORDS];
static uint8_t views[OBSERVERS][WORDS];
static uint8_t sequential[WORDS];

static enum { GOING_ON, SEEN_BEFORE, FAILED } fate;
static ExploreVerdict failure;

static bool tracing;
static char *trace;
static size_t trace_bytes, trace_room;

/* Sets of 128-bit hashes. */
typedef struct {
    uint64_t (*slots)[2];
    uint64_t used, room;
} Set;
static Set states, outcomes;

static uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

static void fold(uint64_t hash[2], uint64_t value) {
    hash[0] = mix(hash[0] * UINT64_C(0x9e3779b97f4a7c15) + value + 1);
    hash[1] = mix((hash[1] ^ value) * UINT64_C(0xd1342543de82ef95) + 3);
}

static void set_clear(Set *set) {
    free(set->slots);
    set->room = 1 << 16;
    set->used = 0;
    set->slots = calloc(set->room, sizeof *set->slots);
}

/* Whether the hash is new. */
static bool set_add(Set *set, const uint64_t hash[2]) {
    if (set->used * 2 > set->room) {
        Set larger = {calloc(set->room * 2, sizeof *set->slots), 0, set->room * 2};
        for (uint64_t i = 0; i < set->room; i++)
            if (set->slots[i][0] | set->slots[i][1]) set_add(&larger, set->slots[i]);
        free(set->slots);
        *set = larger;
    }
    uint64_t i = hash[0] & (set->room - 1);
    while (set->slots[i][0] | set->slots[i][1]) {
        if (set->slots[i][0] == hash[0] && set->slots[i][1] == hash[1]) return false;
        i = (i + 1) & (set->room - 1);
    }
    set->slots[i][0] = hash[0];
    set->slots[i][1] = hash[1];
    set->used++;
    return true;
}

/* Coroutines: the registers that a call preserves go onto the stack, and another stack comes in. */
__attribute__((naked, noinline)) static void switch_stacks(void **from, void *to) {
#if defined(__x86_64__)
    __asm__("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
            "movq %rsp, (%rdi); movq %rsi, %rsp\n"
            "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
#elif defined(__aarch64__)
    __asm__("sub sp, sp, #160\n"
            "stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]\n"
            "stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]\n"
            "stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]\n"
            "mov x9, sp; str x9, [x0]; mov sp, x1\n"
            "ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]\n"
            "ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]\n"
            "ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]\n"
            "add sp, sp, #160; ret");
#endif
}

static void to_main(void) {
    int from = current;
    current = -1;
    switch_stacks(&processes[from].stack_pointer, main_stack_pointer);
    abort(); /* an execution that was given up is not gone on with */
}

static void fail(ExploreVerdict verdict) {
    fate = FAILED;
    failure = verdict;
    if (current >= 0) to_main();
}

static void write_down(const char *format, ...) {
    if (trace_room - trace_bytes < 512) trace = realloc(trace, trace_room = 2 * trace_room + 4096);
    va_list arguments;
    va_start(arguments, format);
    trace_bytes += (size_t)vsnprintf(trace + trace_bytes, 512, format, arguments);
    va_end(arguments);
}

#define note(...)                                                                                                      \
    do {                                                                                                               \
        if (tracing) write_down(__VA_ARGS__);                                                                          \
    } while (0)

static int decide(int count) {
    if (decided == DECISIONS) fail(EXPLORE_TOO_LARGE);
    if (decided < given) {
        if (options[decided] != 0 && options[decided] != count) fail(EXPLORE_NOT_THE_SAME);
        if (chosen[decided] >= count) fail(EXPLORE_NOT_THE_SAME);
    } else {
        chosen[decided] = 0;
    }
    options[decided] = (uint8_t)count;
    decided++;
    if (decided > deepest) deepest = decided;
    return chosen[decided - 1];
}

static bool is_new_state(void) {
    uint64_t hash[2] = {memory_hash[0] ^ operations_hash[0], memory_hash[1] ^ operations_hash[1]};
    fold(hash, clock_ns);
    fold(hash, (uint64_t)left.preemptions << 24 | (uint64_t)left.crashes << 16 | (uint64_t)left.stale_reads << 8 |
                   left.clock_moves);
    /* If it costs nothing to leave it, it makes no difference which one runs. */
    fold(hash, bounds.preemptions == EXPLORE_UNLIMITED ? 0 : (uint64_t)current);
    for (int p = 0; p < bounds.processes; p++) {
        fold(hash, processes[p].observed[0] + processes[p].status);
        fold(hash, processes[p].observed[1]);
        if (bounds.stale_reads)
            for (int word = 0; word < word_count; word += 8) {
                uint64_t eight;
                memcpy(&eight, &views[p][word], 8);
                fold(hash, eight);
            }
    }
    if (bounds.stale_reads)
        for (int word = 0; word < word_count; word += 8) {
            uint64_t eight;
            memcpy(&eight, &sequential[word], 8);
            fold(hash, eight);
        }
    return set_add(&states, hash);
}

static void go_on_with(int process) {
    int from = current;
    current = process;
    processes[process].alone = 0;
    if (from >= 0)
        switch_stacks(&processes[from].stack_pointer, processes[process].stack_pointer);
    else
        switch_stacks(&main_stack_pointer, processes[process].stack_pointer);
}

/* The k-th process that can go on, other than the current one; -1 if there are not so many. */
static int other(int k) {
    for (int p = 0; p < bounds.processes; p++)
        if (p != current && processes[p].status == READY && k-- == 0) return p;
    return -1;
}

static int count_others(void) {
    int count = 0;
    while (other(count) >= 0)
        count++;
    return count;
}

static void go_on_with_another(void) {
    int count = count_others();
    if (count == 0) to_main();
    go_on_with(other(count == 1 ? 0 : decide(count)));
}

static void operation_changed(int i, const ExploreOperation *before) {
    for (int half = 0; half < 2; half++) {
        uint64_t hash[2][2] = {{(uint64_t)i, (uint64_t)half}, {(uint64_t)i, (uint64_t)half}};
        const ExploreOperation *both[2] = {before, &operations[i]};
        for (int k = 0; k < 2; k++) {
            fold(hash[k], (uint64_t)both[k]->state << 32 | (uint64_t)both[k]->outcome << 16 | both[k]->before);
            fold(hash[k], both[k]->now_ns);
            fold(hash[k], both[k]->value);
            fold(hash[k], both[k]->first_ns);
            fold(hash[k], both[k]->last_ns);
        }
        operations_hash[half] ^= hash[0][half] ^ hash[1][half];
    }
}

uint16_t explore_done(void) {
    uint16_t done = 0;
    for (int i = 0; i < EXPLORE_OPERATIONS; i++)
        if (operations[i].state == 2) done |= (uint16_t)(1 << i);
    return done;
}

static void begin_if_due(void) {
    Process *process = &processes[current];
    if (process->to_begin < 0) return;
    for (int begun = process->to_begin; begun < process->to_begin + process->begin_count; begun++) {
        ExploreOperation *operation = &operations[begun], before = *operation;
        operation->state = 1;
        operation->before = explore_done();
        operation_changed(begun, &before);
        note("process %d begins operation %d\n", current, begun);
    }
    process->to_begin = -1;
}

/* Before every step of the current process. */
static void step(void) {
    if (processes[current].starting) {
        processes[current].starting = false;
        int from = current;
        current = -1;
        switch_stacks(&processes[from].stack_pointer, main_stack_pointer);
        begin_if_due();
        return;
    }
    if (++processes[current].alone > bounds.steps_alone) fail(EXPLORE_HELD_UP);
    if (decided >= given && !is_new_state()) {
        fate = SEEN_BEFORE;
        to_main();
    }
    int others = left.preemptions ? count_others() : 0;
    int choice = others || left.crashes ? decide(1 + others + (left.crashes != 0)) : 0;
    if (choice > others) {
        left.crashes--;
        processes[current].status = CRASHED;
        note("process %d is killed\n", current);
        go_on_with_another();
    } else if (choice > 0) {
        if (left.preemptions != EXPLORE_UNLIMITED) left.preemptions--;
        go_on_with(other(choice - 1));
    }
    begin_if_due();
}

static void observe(uint64_t value) { fold(processes[current].observed, value); }

/* The number of a watched word; -1. */
static int word_of(const uint64_t *p) {
    for (int i = 0; i < region_count; i++)
        if (p >= regions[i].base && p < regions[i].base + regions[i].words)
            return regions[i].first < 0 ? -1 : regions[i].first + (int)(p - regions[i].base);
    return -1;
}

static const char *name_of(int word) {
    static char name[64];
    for (int i = 0; i < region_count; i++)
        if (regions[i].first >= 0 && word >= regions[i].first && word < regions[i].first + (int)regions[i].words)
            snprintf(name, sizeof name, "%s[%d]", regions[i].name, word - regions[i].first);
    return name;
}

/* Whether an access is to be explored, and if so, the step before it. */
static bool explored(const uint64_t *p, int words, bool writes, int *word) {
    if (current < 0 || (*word = word_of(p)) < 0) return false;
    if (writes)
        for (int i = 0; i < words; i++)
            if (!ever_written[*word + i]) ever_written[*word + i] = found_another_written = true;
    if (writes && bounds.only_reads) {
        note("process %d writes to %s, or tries to\n", current, name_of(*word));
        fail(EXPLORE_BROKEN);
    }
    is_step = writes || counts[*word] || (words == 2 && counts[*word + 1]);
    if (is_step)
        step();
    else if (!processes[current].at_step)
        begin_if_due();
    return true;
}

static void take_in(int word, int value, bool acquire) {
    uint8_t *view = views[current];
    if (acquire)
        for (int i = 0; i < word_count; i++)
            if (written[word][value].view[i] > view[i]) view[i] = written[word][value].view[i];
    if (view[word] < value) view[word] = (uint8_t)value;
}

/* Which of its values a word shows to the current process: the newest, or an older one that it may still show. */
static int value_shown(int word, int words, ExploreOrder order) {
    int oldest = views[current][word];
    if (words == 2 && views[current][word + 1] > oldest) oldest = views[current][word + 1];
    if (order == EXPLORE_SEQ_CST && sequential[word] > oldest) oldest = sequential[word];
    int shown = newest[word];
    if (left.stale_reads && shown > oldest) {
        int back = decide(1 + shown - oldest);
        if (back) left.stale_reads--;
        shown -= back;
        if (back) note("    an older value:\n");
    }
    for (int i = 0; i < words; i++)
        take_in(word + i, shown, order != EXPLORE_RELAXED);
    return shown;
}

static uint64_t value_hash(int word, int number, uint64_t value, const uint8_t *view, int half) {
    uint64_t hash[2] = {(uint64_t)word << 8 | (uint64_t)number, (uint64_t)half};
    fold(hash, value);
    if (view)
        for (int i = 0; i < word_count; i += 8) {
            uint64_t eight;
            memcpy(&eight, view + i, 8);
            fold(hash, eight);
        }
    return hash[half];
}

static void put(int word, int words, const uint64_t *value, bool release, bool sequentially) {
    uint8_t *view = views[current];
    if (bounds.stale_reads) {
        for (int i = 0; i < words; i++) {
            if (newest[word + i] + 1 == VALUES) fail(EXPLORE_TOO_LARGE);
            view[word + i] = (uint8_t)++newest[word + i];
            if (sequentially) sequential[word + i] = view[word + i];
        }
        for (int i = 0; i < words; i++) {
            Written *now = &written[word + i][newest[word + i]];
            now->value = value[i];
            if (release)
                memcpy(now->view, view, sizeof now->view);
            else
                memset(now->view, 0, sizeof now->view);
            for (int half = 0; half < 2; half++)
                memory_hash[half] ^= value_hash(word + i, newest[word + i], value[i], now->view, half);
        }
    }
    for (int i = 0; i < words; i++) {
        for (int half = 0; half < 2 && !bounds.stale_reads; half++)
            memory_hash[half] ^= value_hash(word + i, 0, *word_address[word + i], NULL, half) ^
                                 value_hash(word + i, 0, value[i], NULL, half);
        *word_address[word + i] = value[i];
    }
    int process = current;
    current = -1;
    int broken = program->invariant ? program->invariant() : 0;
    current = process;
    if (broken) {
        note("the invariant is broken: %d\n", broken);
        fail(EXPLORE_BROKEN);
    }
}

uint64_t explore_load(const uint64_t *p, ExploreOrder order) {
    int word;
    if (!explored(p, 1, false, &word)) return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    uint64_t value = bounds.stale_reads ? written[word][value_shown(word, 1, order)].value : *p;
    if (is_step) note("process %d reads  %s: %#llx\n", current, name_of(word), (unsigned long long)value);
    observe(value);
    return value;
}

void explore_load128(const uint64_t *p, uint64_t value[2]) {
    int word;
    if (!explored(p, 2, false, &word)) {
        value[0] = p[0];
        value[1] = p[1];
        return;
    }
    int shown = bounds.stale_reads ? value_shown(word, 2, EXPLORE_ACQUIRE) : 0;
    for (int i = 0; i < 2; i++) {
        value[i] = bounds.stale_reads ? written[word + i][shown].value : p[i];
        observe(value[i]);
    }
    if (is_step)
        note("process %d reads  %s: %#llx %#llx\n", current, name_of(word), (unsigned long long)value[0],
             (unsigned long long)value[1]);
}

void explore_store(uint64_t *p, uint64_t value, bool release) {
    int word;
    if (!explored(p, 1, true, &word)) {
        __atomic_store_n(p, value, __ATOMIC_RELEASE);
        return;
    }
    note("process %d writes %s: %#llx\n", current, name_of(word), (unsigned long long)value);
    observe(value);
    put(word, 1, &value, release, false);
}

static bool swap(int word, int words, const uint64_t *expected, const uint64_t *desired, ExploreOrder order) {
    bool same = true;
    for (int i = 0; i < words; i++)
        same &= *word_address[word + i] == expected[i];
    if (bounds.stale_reads) {
        /* One that fails may have read an older value: then it has seen less of the others. */
        int shown = newest[word], oldest = views[current][word];
        if (left.stale_reads && order != EXPLORE_SEQ_CST && oldest < shown) {
            int back = decide(2);
            left.stale_reads = (uint8_t)(left.stale_reads - back);
            bool differs = false;
            for (int i = 0; i < words; i++)
                differs |= written[word + i][oldest].value != expected[i];
            if (back && differs) {
                for (int i = 0; i < words; i++)
                    take_in(word + i, oldest, true);
                note("process %d CAS    %s: fails by an older value\n", current, name_of(word));
                observe(0);
                return false;
            }
        }
        for (int i = 0; i < words; i++)
            take_in(word + i, shown, true);
    }
    observe(same);
    note("process %d CAS    %s: %#llx %#llx -> %#llx %#llx: %s\n", current, name_of(word),
         (unsigned long long)expected[0], (unsigned long long)(words == 2 ? expected[1] : 0),
         (unsigned long long)desired[0], (unsigned long long)(words == 2 ? desired[1] : 0), same ? "done" : "fails");
    if (same) put(word, words, desired, true, order == EXPLORE_SEQ_CST);
    return same;
}

bool explore_cas(uint64_t *p, uint64_t expected, uint64_t desired) {
    int word;
    if (!explored(p, 1, true, &word)) {
        bool same = *p == expected;
        if (same) *p = desired;
        return same;
    }
    return swap(word, 1, &expected, &desired, EXPLORE_ACQUIRE);
}

bool explore_cas128(uint64_t *p, const uint64_t expected[2], const uint64_t desired[2], ExploreOrder order) {
    int word;
    if (!explored(p, 2, true, &word)) {
        bool same = p[0] == expected[0] && p[1] == expected[1];
        if (same) {
            p[0] = desired[0];
            p[1] = desired[1];
        }
        return same;
    }
    return swap(word, 2, expected, desired, order);
}

uint64_t explore_update(uint64_t *p, ExploreUpdate update, uint64_t operand, bool ordered) {
    int word;
    bool watched = explored(p, 1, true, &word);
    uint64_t before = *p;
    uint64_t after = update == EXPLORE_ADD  ? before + operand
                     : update == EXPLORE_OR ? before | operand
                                            : before & operand;
    if (!watched) {
        *p = after;
        return before;
    }
    if (bounds.stale_reads) take_in(word, newest[word], ordered);
    observe(before);
    note("process %d update %s: %#llx -> %#llx\n", current, name_of(word), (unsigned long long)before,
         (unsigned long long)after);
    put(word, 1, &after, ordered, false);
    return before;
}

void explore_call(uint64_t *p, size_t words, ExploreCall call, void *context) {
    uint64_t values[WORDS];
    int word;
    if (!explored(p, (int)words, true, &word)) {
        call(p, context);
        return;
    }
    for (size_t i = 0; i < words; i++) {
        if (bounds.stale_reads) take_in(word + (int)i, newest[word + i], true);
        values[i] = p[i];
        observe(values[i]);
    }
    observe(clock_ns);
    int process = current;
    current = -1;
    call(values, context);
    current = process;
    note("process %d calls %s:", current, name_of(word));
    for (size_t i = 0; i < words; i++)
        note(" %#llx", (unsigned long long)values[i]);
    note("\n");
    put(word, (int)words, values, true, true);
}

uint64_t explore_clock(void) {
    if (current < 0) {
        struct timespec t;
        if (clock_ns) return clock_ns;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
    }
    if (bounds.clock_moves || bounds.tick_ns) step();
    if (left.clock_moves) {
        int jump = decide(1 + bounds.jumps);
        if (jump) {
            left.clock_moves--;
            clock_ns += bounds.jumps_ns[jump - 1];
        }
    }
    clock_ns += bounds.tick_ns;
    if (!processes[current].read_ns[0]) processes[current].read_ns[0] = clock_ns;
    processes[current].read_ns[1] = clock_ns;
    note("process %d clock: %llu\n", current, (unsigned long long)(clock_ns - first_clock_ns));
    observe(clock_ns);
    return clock_ns;
}

void explore_set_clock(uint64_t now_ns) { clock_ns = first_clock_ns = now_ns; }

bool explore_is_killed(int process) {
    if (process >= bounds.processes) return false;
    if (current >= 0) observe(processes[process].status);
    return processes[process].status == CRASHED;
}

void explore_begin(int operation, int count) {
    Process *process = &processes[current];
    process->to_begin = operation;
    process->begin_count = count;
    process->at_step = false;
    process->read_ns[0] = process->read_ns[1] = 0;
}

void explore_begin_at_step(int operation) {
    explore_begin(operation, 1);
    processes[current].at_step = true;
}

void explore_end(int operation, int outcome, uint64_t now_ns, uint64_t value) {
    begin_if_due(); /* it may have had no step at all */
    ExploreOperation before = operations[operation];
    operations[operation].state = 2;
    operations[operation].outcome = (uint8_t)outcome;
    operations[operation].now_ns = now_ns;
    operations[operation].value = value;
    operations[operation].first_ns = processes[current].read_ns[0];
    operations[operation].last_ns = processes[current].read_ns[1];
    operation_changed(operation, &before);
    processes[current].alone = 0;
    note("process %d ends operation %d: %d\n", current, operation, outcome);
}

void explore_forget_memory(void) {
    for (int i = 0; i < region_count; i++)
        free(regions[i].content);
    region_count = word_count = 0;
}

static bool add_region(void *base, size_t bytes, const char *name, bool watched) {
    size_t words = bytes / sizeof(uint64_t);
    if (region_count == REGIONS || (watched && word_count + words > WORDS - 8)) return false;
    regions[region_count++] = (Region){base, words, name, malloc(bytes), watched ? word_count : -1};
    for (size_t i = 0; watched && i < words; i++)
        word_address[word_count + (int)i] = (uint64_t *)base + i;
    if (watched) word_count += (int)words;
    return true;
}

bool explore_share(void *base, size_t bytes, const char *name) { return add_region(base, bytes, name, true); }

bool explore_put_back(void *base, size_t bytes) { return add_region(base, bytes, "", false); }

static void process_main(void) {
    program->run(current);
    processes[current].status = FINISHED;
    note("process %d has ended\n", current);
    if (processes[current].starting) to_main();
    go_on_with_another();
}

static void set_up(void) {
    for (int i = 0; i < region_count; i++)
        memcpy(regions[i].base, regions[i].content, regions[i].words * 8);
    memset(memory_hash, 0, sizeof memory_hash);
    memset(operations_hash, 0, sizeof operations_hash);
    memset(operations, 0, sizeof operations);
    if (bounds.stale_reads) {
        memset(views, 0, sizeof views);
        memset(sequential, 0, sizeof sequential);
        for (int i = 0; i < word_count; i++) {
            newest[i] = 0;
            written[i][0].value = *word_address[i];
            memset(written[i][0].view, 0, sizeof written[i][0].view);
        }
    }
    left = bounds;
    clock_ns = first_clock_ns;
    decided = 0;
    fate = GOING_ON;
    trace_bytes = 0;
    for (int p = 0; p < bounds.processes; p++) {
        Process *process = &processes[p];
        if (!process->stack) process->stack = malloc(STACK_BYTES);
        process->status = READY;
        process->to_begin = -1;
        process->starting = true;
        process->observed[0] = process->observed[1] = 0;
        process->alone = 0;
        /* As `switch_stacks` finds it: registers, then where to return to. A function begins with the stack eight
         * bytes off a multiple of sixteen on x86-64. */
        uint64_t *top = (uint64_t *)(process->stack + STACK_BYTES - 64);
#if defined(__x86_64__)
        *--top = 0;
        *--top = (uint64_t)(uintptr_t)process_main;
        for (int i = 0; i < 6; i++)
            *--top = 0;
#else
        top -= 20;
        memset(top, 0, 160);
        top[11] = (uint64_t)(uintptr_t)process_main;
#endif
        process->stack_pointer = top;
    }
}

/* One execution. Whether it came to its end, and its outcome is one that may be. */
static bool execute(ExploreResult *result) {
    set_up();
    for (int p = 0; p < bounds.processes; p++) {
        current = -1;
        go_on_with(p);
    }
    current = -1;
    int count = count_others();
    if (count > 0) {
        int first = count == 1 ? 0 : decide(count);
        if (fate == GOING_ON) go_on_with(other(first));
    }
    current = -1;
    if (fate == FAILED) return false;
    if (fate == SEEN_BEFORE) return true;
    uint64_t finals[EXPLORE_FINALS] = {0};
    if (program->finals) program->finals(finals);
    uint64_t hash[2] = {operations_hash[0], operations_hash[1]};
    for (int i = 0; i < EXPLORE_FINALS; i++)
        fold(hash, finals[i]);
    if (tracing || set_add(&outcomes, hash)) {
        result->outcomes++;
        if (program->judge(operations, bounds.operations, finals) != 0) {
            failure = EXPLORE_WRONG;
            return false;
        }
    }
    return true;
}

static void prepare(const ExploreProgram *its_program, const ExploreBounds *its_bounds) {
    program = its_program;
    bounds = *its_bounds;
    for (int i = 0; i < region_count; i++)
        memcpy(regions[i].content, regions[i].base, regions[i].words * 8);
    for (int i = 0; i < word_count && bounds.stale_reads; i++)
        if (!written[i]) written[i] = malloc(VALUES * sizeof **written);
}

static void finish(ExploreResult *result) {
    for (int i = 0; i < region_count; i++)
        memcpy(regions[i].base, regions[i].content, regions[i].words * 8);
    clock_ns = first_clock_ns;
    result->states = states.used;
    result->deepest = deepest;
}

ExploreResult explore_all(const ExploreProgram *its_program, const ExploreBounds *its_bounds) {
    ExploreResult result = {0};
    prepare(its_program, its_bounds);
    memset(ever_written, 0, sizeof ever_written);
    deepest = 0;
    do {
        found_another_written = false;
        for (int i = 0; i < word_count; i++)
            counts[i] = ever_written[i];
        set_clear(&states);
        set_clear(&outcomes);
        given = 0;
        result = (ExploreResult){0};
        while (true) {
            memset(options + given, 0, 1);
            result.executions++;
            bool is_right = execute(&result);
            /* A read of what was first written now was no step. So an operation may seem to begin later than it did,
             * and a failure by that is none. The next pass finds any other one again. */
            if (found_another_written) break;
            if (!is_right) {
                result.verdict = failure;
                finish(&result);
                return result;
            }
            while (decided > 0 && chosen[decided - 1] + 1 >= options[decided - 1])
                decided--;
            if (decided == 0) break;
            if (result.executions >= bounds.most_executions) {
                result.verdict = EXPLORE_CUT;
                finish(&result);
                return result;
            }
            chosen[decided - 1]++;
            given = decided;
        }
    } while (found_another_written);
    finish(&result);
    return result;
}

size_t explore_decisions(const uint8_t **decisions, const uint8_t **steps, size_t *words) {
    *decisions = chosen;
    *steps = counts;
    *words = (size_t)word_count;
    return decided;
}

ExploreResult explore_again(const ExploreProgram *its_program, const ExploreBounds *its_bounds,
                            const uint8_t *decisions, size_t count, const uint8_t *steps) {
    ExploreResult result = {0};
    prepare(its_program, its_bounds);
    if (count > DECISIONS) count = DECISIONS;
    memmove(chosen, decisions, count);
    memmove(counts, steps, (size_t)word_count);
    memset(options, 0, sizeof options);
    set_clear(&states);
    set_clear(&outcomes);
    given = count;
    tracing = true;
    result.executions = 1;
    if (!execute(&result)) result.verdict = failure;
    tracing = false;
    finish(&result);
    return result;
}

const char *explore_trace(void) { return trace ? trace : ""; }
