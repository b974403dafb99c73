"""Programs of synced limiters for the interleaving explorer: a host that counts, and Redis, which replies.

Limiters report and learn by their own steps, `reports` and `merge`. `run_exchange` stands for the code between them
in forebay/redis/synced/exchange.py. Redis does what scripts/sync_window.lua and sync_bucket.lua do for one host, and
never fails: each message is one step.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.explorer cimport (
    EXPLORE_OPERATIONS, OTHER, YES, Program, explore_begin, explore_call, explore_clock, explore_end, explore_share,
)
from forebay.core.synced.limiter cimport LOOK_ONLY, WORDS_PER_CELL, SyncedLimiter
from forebay.core.synced.hot cimport FILTER_BITS
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_KIND_BITS, FOREBAY_KIND_TAT, FOREBAY_LINES_PER_GROUP, ForebayCell,
)


cdef enum:
    KEYS = 2
    # The one before the program begins, and two.
    WINDOWS = 3
    MOST_CELLS = 2
    HOT_CELLS = FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE
    # For keys whose charges Redis knows all:
    ASK_ALL = -1                 # each is requested
    TELL = -2                    # none is requested


# The state in Redis of a key, or of one of its windows.
cdef struct Reported:
    uint64_t sum                 # of all hosts: permits, or microseconds
    uint64_t tat_us              # of a bucket
    uint64_t known               # of this host
    uint64_t incarnation
    uint64_t read_us             # one more; 0: never


cdef struct Message:
    int key
    int window
    uint64_t index
    uint64_t tag
    uint64_t incarnation
    uint64_t sequence
    uint64_t end_ns              # of the window; of a bucket, when this was read
    uint64_t charged_ns          # of a bucket
    int64_t count                # -1: only requested
    uint64_t believed
    bint has_before              # of a sliding window, the one before
    int64_t count_before
    uint64_t read_us
    uint64_t silence_us
    uint64_t others              # no message: what another host has counted


cdef struct Reply:
    uint64_t sum
    uint64_t ahead_us
    uint64_t known
    uint64_t sum_before
    uint64_t known_before


# The hot lists at Redis.
cdef struct Lists:
    int window
    uint64_t sums[KEYS]
    uint64_t ahead_us[KEYS]


cdef enum What:
    TELL_AND_LEARN
    READ_LISTS                   # and then the same, also for keys of which this host knows less than is published
    ASK                          # the next one of this process learns
    LEARN
    OTHERS


cdef struct Exchange:
    What what
    int64_t round_number
    uint64_t later_us            # than now it is read
    int count
    Message messages[MOST_CELLS]
    Reply replies[MOST_CELLS]


cdef struct Called:
    Message* message
    Reply* reply
    bint takes_back              # what had been reported before, though nothing is ever given back


# A filter of names that has each name.
cdef bytearray ALL_NAMES = bytearray(b"\xff" * (FILTER_BITS // 8))
cdef SyncedProgram syncing = None
cdef Reported[KEYS * WINDOWS] redis


cdef inline uint64_t known_of(const Reported* reported, const Message* message) noexcept:
    """The charges of this incarnation that this host has reported."""
    return reported.known if reported.read_us and reported.incarnation == message.incarnation else 0


cdef bint take_message(Reported* reported, const Message* message, int64_t count, uint64_t now_us) noexcept:
    """Store the counts of one window, or the charges of a bucket. Returns whether they are less than before."""
    cdef uint64_t known
    if count < 0 or message.read_us <= reported.read_us:
        return False
    # The charges that another incarnation reported stay in the sum.
    known = known_of(reported, message)
    if syncing.is_bucket and not (reported.read_us and reported.incarnation == message.incarnation):
        known = min(message.believed, <uint64_t>count)
    if <uint64_t>count > known:
        reported.tat_us = max(reported.tat_us, now_us - min(message.silence_us, now_us)) + (count - known)
    else:
        reported.tat_us -= min(known - count, reported.tat_us)
    reported.sum = reported.sum + count - min(known, reported.sum + count)
    reported.known, reported.incarnation, reported.read_us = count, message.incarnation, message.read_us
    return <uint64_t>count < known


cdef void reply_to_message(uint64_t* values, void* context) noexcept:
    cdef Called* called = <Called*>context
    cdef Message* message = called.message
    cdef Reply* reply = called.reply
    cdef Reported* reported = &(<Reported*>values)[message.key * WINDOWS + message.window]
    cdef Reported* before = reported - 1
    cdef uint64_t now_us = (explore_clock() - syncing.epoch_ns) // 1000
    cdef bint is_less = False
    if message.others:
        reported.sum += message.others
        reported.tat_us = max(reported.tat_us, now_us) + message.others
    else:
        is_less = take_message(reported, message, message.count, now_us)
        if message.has_before:
            is_less |= take_message(before, message, message.count_before, now_us)
            reply.sum_before, reply.known_before = before.sum, known_of(before, message)
    called.takes_back = is_less and not syncing.gives_back
    reply.sum, reply.known = reported.sum, known_of(reported, message)
    reply.ahead_us = reported.tat_us - min(reported.tat_us, now_us)


cdef bint call(Message* message, Reply* reply) noexcept:
    """Whether the report is no less than the one before."""
    cdef Called called = Called(message, reply, False)
    explore_call(<uint64_t*>redis, sizeof(redis) // 8, reply_to_message, &called)
    return not called.takes_back


cdef void read_lists(uint64_t* values, void* context) noexcept:
    cdef Lists* lists = <Lists*>context
    cdef Reported* reported
    cdef uint64_t now_us = (explore_clock() - syncing.epoch_ns) // 1000
    cdef int key
    for key in range(KEYS):
        reported = &(<Reported*>values)[key * WINDOWS + lists.window]
        lists.sums[key] = reported.sum
        lists.ahead_us[key] = reported.tat_us - min(reported.tat_us, now_us)


cdef void keep_lists() noexcept:
    """Keep all published sums. Here each key is hot, however little of its limit is used."""
    cdef Lists lists
    cdef SyncedLimiter limiter = syncing.limiter
    cdef uint64_t read_ns = limiter.segment.now_ns()
    cdef uint64_t end_ns = 0
    cdef int key
    lists.window = 1
    if not syncing.is_bucket:
        # A window begins at a multiple of the period: see `adopt`.
        end_ns = read_ns + syncing.period_ns - read_ns % syncing.period_ns + limiter.segment.wall_epoch_ns
        lists.window = 1 + (end_ns - syncing.first_end_ns) // syncing.period_ns
    explore_call(<uint64_t*>redis, sizeof(redis) // 8, read_lists, &lists)
    for key in range(KEYS):
        if lists.sums[key] == 0:
            continue
        if syncing.is_bucket:
            syncing.limiter.learn(
                syncing.names[key], read_ns + 1000 * (lists.ahead_us[key] - min(lists.ahead_us[key], 1)))
        else:
            syncing.limiter.learn(syncing.names[key], end_ns, lists.sums[key])


cdef int read_messages(
    int64_t round_number, bytearray learned, uint64_t later_us, Message* messages, bint* is_wrong
) noexcept:
    """Collect the reports that are due; `is_wrong` if one has the name of another key."""
    cdef Message* message
    cdef int count = 0
    reports = syncing.limiter.reports(0, syncing.usable, round_number, learned)[0]
    for report in reports:
        message = &messages[count]
        message.index, message.tag, message.incarnation, message.sequence = report[0]
        message.key = syncing.number_of(report[1])
        is_wrong[0] |= message.tag != syncing.tags[message.key]
        message.read_us = <uint64_t>report[2] + later_us + 1
        message.window, message.silence_us, message.others, message.has_before = 1, 0, 0, syncing.slides
        if syncing.is_bucket:
            message.charged_ns, message.believed, message.end_ns = report[3], report[4], report[5]
            message.count = message.charged_ns // 1000
            message.silence_us = (message.end_ns - <uint64_t>report[6] + 999) // 1000
        else:
            message.end_ns, message.count, message.believed = report[3], report[4], report[5]
            message.count_before = report[7]
            message.window = 1 + (message.end_ns - syncing.first_end_ns) // syncing.period_ns
        count += 1
    return count


cdef tuple reply_of(uint64_t sum_of_all, uint64_t known):
    return known, sum_of_all - min(known, sum_of_all), False


cdef void learn(Message* message, Reply* reply) noexcept:
    place = (message.index, message.tag, message.incarnation, message.sequence)
    if syncing.is_bucket:
        syncing.limiter.merge(
            place, message.charged_ns, reply.known, message.end_ns,
            1000 * (reply.ahead_us - min(reply.ahead_us, 1)))
    else:
        syncing.limiter.merge(
            place, message.end_ns, reply_of(reply.sum, reply.known),
            reply_of(reply.sum_before, reply.known_before) if message.has_before else None)


cdef bint ask(Exchange* its) noexcept:
    """Whether all was reported by its own name, and no less than before."""
    cdef bint is_wrong = False
    cdef int i
    its.count = read_messages(
        its.round_number, ALL_NAMES if its.what == READ_LISTS else None, its.later_us, its.messages, &is_wrong)
    for i in range(its.count):
        is_wrong |= not call(&its.messages[i], &its.replies[i])
    return not is_wrong


cdef void learn_all(Exchange* its) noexcept:
    cdef int i
    for i in range(its.count):
        learn(&its.messages[i], &its.replies[i])


cdef void run_exchange(int index) noexcept:
    cdef Exchange* its = &syncing.exchanges[index]
    cdef bint is_right = True
    explore_begin(index, 1)
    if its.what == OTHERS:
        call(&its.messages[0], &its.replies[0])
    elif its.what == LEARN:
        learn_all(&syncing.exchanges[index - 1])
    else:
        if its.what == READ_LISTS:
            keep_lists()
        is_right = ask(its)
        if its.what != ASK:
            learn_all(its)
    explore_end(index, YES if is_right else 0, 0, 0)


cdef void exchange_now(int64_t round_number, uint64_t later_us) noexcept:
    """Between explorations the clock stands still, and Redis takes only what was read later than what it has."""
    cdef Exchange its
    its.what, its.round_number, its.later_us = TELL_AND_LEARN, round_number, later_us
    ask(&its)
    learn_all(&its)


cdef class SyncedProgram(Program):
    """The operations of a host's processes on a synced limiter's keys, and the reports of its exchangers to Redis."""

    cdef Exchange[EXPLORE_OPERATIONS] exchanges
    cdef object limiter
    cdef list names
    cdef uint64_t[KEYS] tags
    cdef uint64_t usable
    cdef bint is_bucket
    cdef bint slides
    cdef public bint gives_back
    cdef uint64_t first_end_ns
    cdef uint64_t period_ns

    def adopt_synced(self, CellLimiter limiter, usable, is_bucket, slides):
        """Watch it; as `adopt`. Returns its keys: their names are those that it was given the first time."""
        global syncing
        cdef int i
        if usable > MOST_CELLS:
            raise ValueError("too many cells")
        cdef SyncedLimiter synced = limiter
        cdef ForebayCell* hot = synced.hot_cells.table.cells
        self.adopt(limiter, usable)
        synced.hot_cells.table.group_count = 1
        for i in range(KEYS, HOT_CELLS):
            hot[i].tag, hot[i].state = <uint64_t>(i + 1) << FOREBAY_KIND_BITS | FOREBAY_KIND_TAT, 10**18
        if not explore_share(hot, HOT_CELLS * sizeof(ForebayCell), b"hot"):
            raise ValueError("more memory than the explorer can watch")
        if not explore_share(
                limiter.params.records, WORDS_PER_CELL * <size_t>usable * 8, b"behind") or not explore_share(
            redis, sizeof(redis), b"redis"
        ):
            raise ValueError("more memory than the explorer can watch")
        self.limiter, self.usable, self.is_bucket, self.slides = limiter, usable, is_bucket, slides
        self.period_ns = limiter.params.period_ns
        self.first_end_ns = (
            self.now_ns + self.period_ns - self.now_ns % self.period_ns + limiter.segment.wall_epoch_ns)
        self.names = []
        keys = [self.key(limiter, number=i) for i in range(KEYS)]
        for i, key in enumerate(keys):
            self.tags[i] = limiter.tag_of(key)
        syncing = self
        return keys

    cdef int number_of(self, bytes name) noexcept:
        """Which key is called so; 0 if none is, as for a record of no key."""
        return self.names.index(name) if name in self.names else 0

    def begin_afresh(self, names, int nameless):
        """Empty cells, once the limiter has called these keys by name. One of them, if not -1, has lost it since."""
        cdef SyncedLimiter limiter = self.limiter
        self.names = names
        if nameless >= 0:
            limiter.names.by_tag.pop(self.tags[nameless])
        memset(limiter.table.cells, 0, self.usable * sizeof(ForebayCell))
        memset(limiter.params.records, 0, self.usable * WORDS_PER_CELL * 8)
        memset(limiter.hot_cells.table.cells, 0, KEYS * sizeof(ForebayCell))
        memset(redis, 0, sizeof(redis))

    def exchanges_now(self):
        """Between explorations."""
        exchange_now(ASK_ALL, 0)

    cdef Exchange* add_exchange(self, process, What what) except NULL:
        cdef Exchange* its = &self.exchanges[self.count]
        self.next_operation(process, OTHER)
        memset(its, 0, sizeof(its[0]))
        its.what, its.round_number = what, TELL
        return its

    def exchange(self, process):
        """Report all charges that aren't reported yet, and merge the reply."""
        self.add_exchange(process, TELL_AND_LEARN)

    def read_lists(self, process):
        """Keep what is published, report all charges that aren't reported yet, query the keys of which the host knows
        less than is published, and merge the replies."""
        self.add_exchange(process, READ_LISTS)

    def ask(self, process):
        """Report and request all. The reply is lost unless this process's next operation merges it."""
        self.add_exchange(process, ASK).round_number = ASK_ALL

    def learn_answer(self, process):
        self.add_exchange(process, LEARN)

    def others_now(self, key, count):
        """Between explorations, as `others_count`."""
        cdef Reported* reported = &redis[<int>key * WINDOWS + 1]
        reported.sum += count
        reported.tat_us = max(reported.tat_us, self.now_ns // 1000) + count

    def others_count(self, process, key, count, window=0):
        """Another host has reported so much of a key."""
        cdef Exchange* its = self.add_exchange(process, OTHERS)
        its.messages[0].key, its.messages[0].window, its.messages[0].others = key, 1 + <int>window, count

    cdef void run_other(self, int index) noexcept:
        run_exchange(index)

    def tell(self):
        """At the end, what is to be reported. Returns of how many keys nothing can be, for want of a name."""
        exchange_now(TELL, 1)
        return self.limiter.reports(0, self.usable, LOOK_ONLY)[1]

    def learn(self):
        """At the end, after that."""
        exchange_now(ASK_ALL, 2)
        return 0

    def sum_at_redis(self, key, window=0):
        return redis[<int>key * WINDOWS + 1 + <int>window].sum
