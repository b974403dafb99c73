/* The interleaving explorer: it decides which process runs next, which value a load reads, what time it is, and which
 * process is killed.
 *
 * forebay is compiled a second time with FOREBAY_EXPLORE defined: then include/forebay/atomics.h and clock.h call
 * the functions below instead of touching memory and clock. Between explorations these do at once what their names
 * mean. During one, `processes` coroutines run programs over the same memory, and each access is a step: before it, the
 * explorer decides. It walks all decisions, depth first, by running the programs again and again from the start.
 */
#ifndef FOREBAY_INTERLEAVE_EXPLORE_H
#define FOREBAY_INTERLEAVE_EXPLORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EXPLORE_PROCESSES = 4,
    EXPLORE_OPERATIONS = 12, /* of all processes together */
    EXPLORE_FINALS = 8,
    EXPLORE_JUMPS = 4,
    EXPLORE_UNLIMITED = 255,
};

typedef enum { EXPLORE_RELAXED, EXPLORE_ACQUIRE, EXPLORE_SEQ_CST } ExploreOrder;

/* The functions that the instrumented code calls. */
uint64_t explore_load(const uint64_t *p, ExploreOrder order);
void explore_load128(const uint64_t *p, uint64_t value[2]);
void explore_store(uint64_t *p, uint64_t value, bool release);
bool explore_cas(uint64_t *p, uint64_t expected, uint64_t desired);
bool explore_cas128(uint64_t *p, const uint64_t expected[2], const uint64_t desired[2], ExploreOrder order);
typedef enum { EXPLORE_ADD, EXPLORE_OR, EXPLORE_AND } ExploreUpdate;
uint64_t explore_update(uint64_t *p, ExploreUpdate update, uint64_t operand, bool ordered);
uint64_t explore_clock(void);

/* A call of another machine, which has a state of its own: one step, which reads and writes these words. */
typedef void (*ExploreCall)(uint64_t *values, void *context);
void explore_call(uint64_t *p, size_t words, ExploreCall call, void *context);

/* Bugs that native/interleave/planted_bugs.py has put into the code that is explored; 0 is none. */
extern int explore_planted;

/* One operation of a program, and what came of it. */
typedef struct {
    uint8_t process;
    uint8_t state;   /* 0: not begun; 1: begun; 2: done */
    uint16_t before; /* bit i: operation i was done before this one's first step */
    uint8_t outcome;
    uint64_t now_ns; /* the clock reading that it was decided by */
    uint64_t value;
    uint64_t first_ns, last_ns; /* its first and last clock readings; 0 if it had none */
} ExploreOperation;

typedef struct {
    uint8_t processes;
    uint8_t operations;
    uint8_t preemptions; /* a process that could go on is left for another one: so often; EXPLORE_UNLIMITED */
    uint8_t crashes;     /* a process never goes on: so many of them */
    uint8_t stale_reads; /* a load reads what a weaker memory might still show it: so often; 0: the x86's loads */
    uint8_t clock_moves; /* the clock moves on by one of `jumps_ns`: so often */
    uint8_t jumps;
    uint64_t jumps_ns[EXPLORE_JUMPS];
    uint64_t tick_ns;     /* by which the clock moves on at every reading, besides */
    bool only_reads;      /* a process that writes to a watched word, or tries to, breaks the invariant */
    uint32_t steps_alone; /* more steps than this in a row, and a process is held up by another one */
    uint64_t most_executions;
} ExploreBounds;

typedef enum {
    EXPLORE_COMPLETE,     /* every schedule within the bounds */
    EXPLORE_CUT,          /* most_executions reached */
    EXPLORE_HELD_UP,      /* a process that no other disturbs doesn't come to an end */
    EXPLORE_BROKEN,       /* the invariant doesn't hold after a step */
    EXPLORE_WRONG,        /* the outcome was refused */
    EXPLORE_TOO_LARGE,    /* more writes, steps or decisions than there is room for: make the program smaller */
    EXPLORE_NOT_THE_SAME, /* the same decisions led elsewhere: something that counts is not put back */
} ExploreVerdict;

typedef struct {
    ExploreVerdict verdict;
    uint64_t executions; /* schedules walked to their end, or to a state that was seen before */
    uint64_t states;
    uint64_t outcomes;
    uint64_t deepest;
} ExploreResult;

/* A program, as the explorer calls it. */
typedef struct {
    void (*run)(int process);                        /* all operations of a process, in its coroutine */
    int (*invariant)(void);                          /* after every write: 0 if all is well */
    void (*finals)(uint64_t finals[EXPLORE_FINALS]); /* the values to check in the end, by the main program */
    int (*judge)(const ExploreOperation *operations, int count, const uint64_t finals[EXPLORE_FINALS]);
} ExploreProgram;

/* Memory that the processes share; it is put back before each execution. Named in traces by `name` and an index. */
void explore_forget_memory(void);
bool explore_share(void *base, size_t bytes, const char *name);
/* Memory that is put back but not watched. */
bool explore_put_back(void *base, size_t bytes);

void explore_set_clock(uint64_t now_ns);
ExploreResult explore_all(const ExploreProgram *program, const ExploreBounds *bounds);
/* The decisions of the execution that failed, and for each shared word whether accesses to it were steps; and one
 * execution by given ones, which is written down. */
size_t explore_decisions(const uint8_t **decisions, const uint8_t **steps, size_t *words);
ExploreResult explore_again(const ExploreProgram *program, const ExploreBounds *bounds, const uint8_t *decisions,
                            size_t count, const uint8_t *steps);
const char *explore_trace(void);

/* Called by programs, from within `run`. */
void explore_begin(int operation, int count); /* so many at once, from this one on */
void explore_begin_at_step(int operation);    /* not at a read of what nobody writes */
void explore_end(int operation, int outcome, uint64_t now_ns, uint64_t value);
bool explore_is_killed(int process);
uint16_t explore_done(void); /* bit i: operation i is done */

#endif
