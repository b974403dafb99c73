"""The parts of a program for the interleaving explorer, for classes that derive from it. See explorer.pyx."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport Charge
from forebay.core.table.native cimport ForebayCell


cdef extern from "explore.h":
    enum:
        EXPLORE_OPERATIONS
        EXPLORE_PROCESSES
        EXPLORE_FINALS
        EXPLORE_UNLIMITED
    ctypedef struct ExploreOperation:
        uint8_t process
        uint8_t state
        uint16_t before
        uint8_t outcome
        uint64_t now_ns
        uint64_t value
        uint64_t first_ns
        uint64_t last_ns
    ctypedef struct ExploreBounds:
        uint8_t processes
        uint8_t operations
        uint8_t preemptions
        uint8_t crashes
        uint8_t stale_reads
        uint8_t clock_moves
        uint8_t jumps
        uint64_t jumps_ns[4]
        uint64_t tick_ns
        bint only_reads
        uint32_t steps_alone
        uint64_t most_executions
    ctypedef struct ExploreResult:
        int verdict
        uint64_t executions
        uint64_t states
        uint64_t outcomes
        uint64_t deepest
    ctypedef struct ExploreProgram:
        void (*run)(int process) noexcept
        int (*invariant)() noexcept
        void (*finals)(uint64_t* finals) noexcept
        int (*judge)(const ExploreOperation* operations, int count, const uint64_t* finals) noexcept
    ctypedef void (*ExploreCall)(uint64_t* values, void* context) noexcept
    int explore_planted
    void explore_forget_memory()
    bint explore_share(void* base, size_t bytes, const char* name)
    bint explore_put_back(void* base, size_t bytes)
    void explore_set_clock(uint64_t now_ns)
    uint64_t explore_clock()
    ExploreResult explore_all(const ExploreProgram* program, const ExploreBounds* bounds)
    size_t explore_decisions(const uint8_t** decisions, const uint8_t** steps, size_t* words)
    ExploreResult explore_again(
        const ExploreProgram* program, const ExploreBounds* bounds, const uint8_t* decisions, size_t count,
        const uint8_t* steps)
    const char* explore_trace()
    void explore_call(uint64_t* p, size_t words, ExploreCall call, void* context)
    void explore_begin(int operation, int count)
    void explore_begin_at_step(int operation)
    bint explore_is_killed(int process)
    uint16_t explore_done()
    void explore_end(int operation, int outcome, uint64_t now_ns, uint64_t value)


cdef enum Kind:
    HIT
    REFUND
    PEEK
    RESET
    RESERVE
    CANCEL
    BATCH
    BATCHED                      # the other requests of a batch
    ADD
    HIT_ALL
    HIT_ONCE
    HIT_ALL_ONCE
    HIT_DECISION
    ACQUIRE
    ACQUIRE_ONCE
    RELEASE
    RENEW
    RESET_SLOTS
    REFUND_ONCE
    LOAD
    STORE
    SWAP
    OTHER                        # of a program that derives from this one


# Flags of an operation's outcome. FULL alone: denied, as there was no room in the table.
cdef enum:
    YES = 1
    FULL = 2


cdef enum:
    MOST_SLOTS = 4               # of one acquisition


# One operation of a process.
cdef struct Operation:
    int process
    Kind kind
    void* limiter
    uint64_t tag
    Charge charge
    void* key                    # of AllOf and of requests with an id: held by the program
    void* request_id
    int earlier                  # the operation that is undone or renewed
    int64_t cost                 # of an acquisition, or how many there are in a batch
    int slot_count               # what an acquisition has got
    uint64_t[MOST_SLOTS] slots
    ForebayCell lease
    uint64_t left                # the state that a reservation has left; 0: nothing was booked
    uint64_t word                # of litmus tests
    uint64_t expected
    uint64_t desired
    bint strong                  # sequentially consistent, not only acquire and release


# A key of a table.
cdef struct Member:
    const ForebayCell* cells
    uint64_t tag


cdef class Program:
    cdef Operation[EXPLORE_OPERATIONS] operations
    cdef int count
    cdef Member[EXPLORE_OPERATIONS] members
    cdef int member_count
    cdef int processes
    cdef list held
    cdef list looks
    cdef dict leases             # of acquisitions with an id, by their number; None: no ids
    cdef list tables
    cdef object judge
    cdef str complaint
    cdef readonly uint64_t now_ns
    cdef uint64_t epoch_ns

    cdef Operation* add(self, int process, Kind kind, CellLimiter limiter, key, cost) except NULL
    cdef int has_one(self, const ForebayCell* cells, uint64_t tag) except -1
    cdef Operation* next_operation(self, int process, Kind kind) except NULL
    cdef ExploreBounds bounds(
        self, preemptions, crashes, stale_reads, clock_moves, jumps_ns, tick_ns, only_reads, steps_alone,
        most_executions,
    ) except *

    # For programs of other limiters: an operation of kind OTHER, and what must hold after every write besides.
    cdef void run_other(self, int index) noexcept
    cdef int check_other(self) noexcept
