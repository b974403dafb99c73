"""The mappings of a segment and its extents, and the segment's clock."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from forebay.core.table.keys cimport derive_key
from forebay.core.table.moving cimport freeze_cells, kind_in, show_progress, thaw_cells, thawed
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_CLOCK_MONOTONIC, FOREBAY_CLOCK_PYTHON, FOREBAY_EXTENT_ALIGNMENT, FOREBAY_KIND_BITS,
    FOREBAY_KIND_BLOCKED, FOREBAY_KIND_TAT, FOREBAY_KIND_USED, FOREBAY_LATENCY_BUCKETS, FOREBAY_LATENCY_LEAST_NS,
    FOREBAY_LINES_PER_GROUP, FOREBAY_MOVED_GROUPS_BITS, ForebayCell, ForebayCounterLine, ForebayExtentEntry,
    ForebayHeader, ForebayLimiterEntry, cas_acq_rel, coarse_ns, fetch_add_relaxed, load128_acquire, load_acquire,
    load_acquire32, load_relaxed, siphash13, store_relaxed, store_release, store_release32,
)
from forebay.core.table.table cimport (
    ALLOW, ALLOWED, DENY, EVICT, Events, Next, Table, Verdict, cells_in, expiry_of, no_events, table_count_live,
    table_decide, table_find, table_now,
)
from forebay.core.table.threads cimport forks_counter
from forebay.segment.mapping cimport map_aligned

import time

from forebay.rate import MAX_PERIOD_NS
from forebay.segment import attachment_locks, layout, sizes


cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ, PROT_WRITE, MAP_SHARED
    void* MAP_FAILED
    int MREMAP_MAYMOVE
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset)
    void* mremap(void* address, size_t old_size, size_t size, int flags)
    int munmap(void* address, size_t size)


cdef extern from "<fcntl.h>" nogil:
    int O_RDWR, O_CLOEXEC, O_NOFOLLOW, F_WRLCK, F_UNLCK

    struct FileLock "flock":
        short l_type
        short l_whence
        long l_start
        long l_len
        int l_pid

    int open(const char* path, int flags)


cdef extern from "<sys/stat.h>" nogil:
    struct Status "stat":
        uint64_t st_dev
        uint64_t st_ino
        uint64_t st_size


cdef extern from "<sys/syscall.h>" nogil:
    long SYS_fcntl, SYS_fstat


cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int usleep(unsigned int us)
    # The C library's `fcntl` and `fstat` have newer names, which older systems lack.
    long syscall(long number, ...)


cdef long RESIZE_BYTE = attachment_locks.RESIZE_BYTE
cdef uint64_t BYTES_PER_KEY = sizes.BYTES_PER_KEY


cdef enum:
    F_OFD_SETLK = 37             # of Linux's headers; in those of the C library only with _GNU_SOURCE
    WAIT_US = 1000
    WAITS_PER_LOOK = 20          # how often a waiting process sees whether the mover has died
    MOST_WAITS = 5000            # in which a mover that isn't stopped raises `resize_progress`


cdef inline ForebayHeader* header_of(const Moves* moves) noexcept nogil:
    return <ForebayHeader*>moves.base


cdef uint64_t check_of(const Moves* moves, uint64_t place, uint64_t keys) noexcept nogil:
    """The header's `moved_check`. Damage of the other two words leads no process out of the file."""
    cdef uint64_t[2] words
    words[0] = place
    words[1] = keys
    return siphash13(moves.hash_key, <const uint8_t*>words, sizeof(words))


cdef inline uint64_t offset_of(uint64_t place) noexcept nogil:
    return (place >> FOREBAY_MOVED_GROUPS_BITS) * FOREBAY_EXTENT_ALIGNMENT


cdef inline uint64_t bytes_of(uint64_t place) noexcept nogil:
    return (place & ((<uint64_t>1 << FOREBAY_MOVED_GROUPS_BITS) - 1)) * (
        FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE * sizeof(ForebayCell))


cdef void mend_check(const Moves* moves, uint64_t place, uint64_t file_size) noexcept nogil:
    """Make the header's words agree with the place of the table: a mover that was killed may have written the others
    alone. How many keys were asked for is lost; the table has room for these. The caller has the mover's lock.
    """
    cdef ForebayHeader* header = header_of(moves)
    cdef uint64_t end = offset_of(place) + bytes_of(place)
    if place == 0 or header.moved_check == check_of(moves, place, header.moved_keys):
        return
    if bytes_of(place) != 0 and offset_of(place) >= moves.made_bytes and end <= file_size:
        store_release(&header.moved_keys, bytes_of(place) // BYTES_PER_KEY)
        store_release(&header.moved_check, check_of(moves, place, header.moved_keys))


cdef bint use_place(Table* table, Moves* moves, uint64_t place) noexcept nogil:
    """Make `table` a view of the table at that place. False if it can't be mapped, or the header is damaged."""
    cdef View* view = <View*>load_acquire(<uint64_t*>&moves.views)
    cdef View* made
    if view == NULL or view.place != place:
        if load_acquire(&header_of(moves).moved_check) != check_of(
                moves, place, load_acquire(&header_of(moves).moved_keys)):
            return False
        made = <View*>malloc(sizeof(View))
        if made == NULL:
            return False
        made.size = offset_of(place) + bytes_of(place)
        # A second mapping of the same file, further on: of an old size of 0 mremap makes one. It needs no descriptor,
        # and a process may have closed all of its own, or may not open the file any more.
        made.base = <char*>mremap(moves.base, 0, made.size, MREMAP_MAYMOVE)
        if made.base == <char*>MAP_FAILED:
            free(made)
            return False
        made.place = place
        made.cells = <ForebayCell*>(made.base + offset_of(place))
        made.group_count = place & ((<uint64_t>1 << FOREBAY_MOVED_GROUPS_BITS) - 1)
        made.before = view
        if not cas_acq_rel(<uint64_t*>&moves.views, <uint64_t>view, <uint64_t>made):
            munmap(made.base, made.size)
            free(made)
            return use_place(table, moves, place)
        view = made
    table.cells = view.cells
    table.group_count = view.group_count
    table.place = place
    return True


cdef bint end_resize(Table* table, Moves* moves) noexcept nogil:
    """Thaw the table if the mover has died. Whether `resize_progress` is even now."""
    cdef FileLock lock
    cdef Status status
    cdef Table own = table[0]
    cdef uint64_t place, progress
    cdef bint ended = False
    cdef int fd = open(moves.path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) if moves.path != NULL else -1
    if fd < 0:
        return False
    lock.l_type = <short>F_WRLCK
    lock.l_whence = 0
    lock.l_start = RESIZE_BYTE
    lock.l_len = 1
    lock.l_pid = 0
    if (
        syscall(SYS_fstat, fd, &status) == 0 and status.st_dev == moves.device and status.st_ino == moves.inode
        and syscall(SYS_fcntl, fd, F_OFD_SETLK, &lock) == 0
    ):
        progress = load_acquire(&header_of(moves).resize_progress)
        place = load_acquire(&header_of(moves).moved_table)
        ended = progress & 1 == 0
        if not ended:
            mend_check(moves, place, status.st_size)
            ended = place == own.place or use_place(&own, moves, place)
            if ended:
                thaw_cells(own.cells, cells_in(&own), &header_of(moves).resize_progress)
                store_release(&header_of(moves).resize_progress, header_of(moves).resize_progress + 1)
        # A close alone would leave the lock with a child that another thread forked meanwhile.
        lock.l_type = <short>F_UNLCK
        syscall(SYS_fcntl, fd, F_OFD_SETLK, &lock)
    close(fd)
    return ended


cdef bint follow_resize(void* followed) noexcept nogil:
    """`Home.follow`: see moving.pxd. It keeps the GIL, if the caller has it: a batch's keys must stay as they are."""
    cdef Table* table = <Table*>followed
    cdef Moves* moves = <Moves*>table.home
    cdef ForebayHeader* header = header_of(moves)
    cdef uint64_t progress, place, last = 0
    cdef int waits = 0
    while True:
        progress = load_acquire(&header.resize_progress)
        if progress & 1 == 0:
            place = load_acquire(&header.moved_table)
            if place == table.place or use_place(table, moves, place):
                if load_acquire(&header.resize_progress) == progress:
                    table.epoch = progress
                    return True
            elif load_acquire(&header.resize_progress) == progress:
                return False
            continue
        if progress != last:
            last = progress
            waits = 0
        if waits % WAITS_PER_LOOK == 0 and end_resize(table, moves):
            continue
        if waits == MOST_WAITS or load_relaxed(&moves.given_up) == progress:
            store_relaxed(&moves.given_up, progress)
            return False
        usleep(WAIT_US)
        waits += 1


cdef bint leave_given(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* given, Next* next
) noexcept nogil:
    """A decision that leaves a given state."""
    next.state = (<const uint64_t*>given)[0]
    return True


cdef bint put_copy(
    Table* table, uint64_t* words, uint64_t word_count, const uint64_t* copy, bint in_place
) noexcept nogil:
    """Put a key's copy, see `audit.copy_live`, into a table that no other process uses. False if there is no room.

    A key that is there already was copied twice, as it came to another cell meanwhile. The later copy counts.
    """
    cdef uint64_t state, sequence = 0
    cdef uint64_t kind = copy[1] & ((1 << FOREBAY_KIND_BITS) - 1)
    cdef ForebayCell* cell
    cdef Verdict verdict
    cdef Events events = no_events()
    if not FOREBAY_KIND_TAT <= kind <= FOREBAY_KIND_USED:
        return False
    if not in_place:
        verdict.now_ns = table_now(table)
        table_decide(table, copy[1], 0, &sequence, leave_given, &copy[2], &verdict, &events)
        return verdict.outcome == ALLOWED
    cell = table_find(table, copy[1], &state)
    if cell == NULL:
        if copy[0] >= table.group_count * FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE:
            return False
        cell = table.cells + copy[0]
        if cell.tag != 0:
            return False
    cell.tag = copy[1]
    cell.state = copy[2]
    if word_count != 0:
        memcpy(words + <uint64_t>(cell - table.cells) * word_count, copy + 3, word_count * sizeof(uint64_t))
    return True


cdef uint64_t carry_cells(
    const Table* table, const Table* target, uint64_t* progress, uint64_t* live
) noexcept nogil:
    """Put the live keys of a frozen table into one that no other process uses. The number of those without room."""
    cdef Table to = target[0]
    cdef Verdict verdict
    cdef Events events = no_events()
    cdef ForebayCell seen
    cdef uint64_t i, sequence = 0, without_room = 0, now_ns = table_now(table)
    to.on_full = DENY
    for i in range(cells_in(table)):
        seen = thawed(load128_acquire(&table.cells[i]))
        if kind_in(seen.tag) >= FOREBAY_KIND_TAT and expiry_of(table, seen, now_ns) > now_ns:
            live[0] += 1
            verdict.now_ns = now_ns
            table_decide(&to, seen.tag, 0, &sequence, leave_given, &seen.state, &verdict, &events)
            without_room += verdict.outcome != ALLOWED
        show_progress(i, progress)
    return without_room


cdef uint64_t move_cells(
    const Table* table, const Table* target, ForebayHeader* header, uint64_t place, uint64_t keys, uint64_t check,
    uint64_t* live,
) noexcept nogil:
    cdef uint64_t progress = load_acquire(&header.resize_progress)
    cdef uint64_t without_room
    # Odd already: an earlier mover has died. Its frozen cells stay as they are.
    store_release(&header.resize_progress, progress + 1 + (progress & 1))    # SYNC freeze -> search
    freeze_cells(table.cells, cells_in(table), &header.resize_progress)
    without_room = carry_cells(table, target, &header.resize_progress, live)
    if without_room == 0:
        store_release(&header.moved_keys, keys)
        store_release(&header.moved_check, check)
        store_release(&header.moved_table, place)
    else:
        thaw_cells(table.cells, cells_in(table), &header.resize_progress)
    store_release(&header.resize_progress, header.resize_progress + 1)
    return without_room


cdef uint64_t put_copies(
    Table* table, uint64_t* words, uint64_t word_count, bytes copies, bint in_place
) except? 0:
    """The number of copies for which there was no room."""
    cdef const uint64_t* copy = <const uint64_t*>PyBytes_AS_STRING(copies)
    cdef uint64_t size = 3 + word_count, without_room = 0
    cdef uint64_t i, count = <uint64_t>PyBytes_GET_SIZE(copies) // (size * sizeof(uint64_t))
    if count * size * sizeof(uint64_t) != <uint64_t>PyBytes_GET_SIZE(copies):
        raise ValueError(f"{len(copies)} bytes are no copies of keys with {word_count} words")
    with nogil:
        for i in range(count):
            without_room += not put_copy(table, words, word_count, copy + i * size, in_place)
    return without_room


@cython.final
cdef class Extent:
    """The mapping of an extent: `group_count` groups, followed by `word_count` words.

    Keys use the first `used_cells` cells; the other cells of the table are blocked. The constructor takes an open file
    descriptor and keeps no reference to it. The mapping lives as long as the object.
    """

    def __cinit__(
        self, Segment segment, int fd, *, uint64_t offset, uint64_t keys, uint64_t group_count, uint64_t used_cells,
        uint64_t word_count,
    ):
        cdef size_t table_bytes = group_count * <size_t>layout.GROUP_BYTES
        cdef void* address
        self.size = table_bytes + word_count * sizeof(uint64_t)
        self.keys = keys
        self.used_cells = used_cells
        address = mmap(NULL, self.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, <long>offset)
        if address == MAP_FAILED:
            raise OSError(errno, f"cannot map an extent of {self.size} bytes")
        self.base = <char*>address
        self.table = segment.table
        self.table.home = NULL
        self.table.cells = <ForebayCell*>address
        self.table.group_count = group_count
        self.table.has_record = word_count != 0
        self.table.end = self.table.cells + used_cells
        self.table.line_mask = <uint64_t>(FOREBAY_LINES_PER_GROUP - 1)
        # A line without a usable cell must not be the home line of any key.
        while self.table.line_mask and used_cells <= self.table.line_mask // 2 * FOREBAY_CELLS_PER_LINE + (
                FOREBAY_CELLS_PER_LINE):
            self.table.line_mask //= 2
        self.records = <uint64_t*>(self.base + table_bytes)

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.size)

    def block_cells(self, uint64_t used_cells):
        """Block every cell from `used_cells` on. Only for the extent's creator, before other processes can find it."""
        cdef uint64_t i
        cdef uint64_t cells = self.table.group_count * FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE
        for i in range(used_cells, cells):
            self.table.cells[i].tag = FOREBAY_KIND_BLOCKED

    def put_copies(self, bytes copies):
        """Put copies of keys with their words into the cells where they were; the number that had no room there."""
        cdef uint64_t words = <uint64_t>(self.base + self.size - <char*>self.records) // sizeof(uint64_t)
        return put_copies(&self.table, self.records, words // self.used_cells, copies, True)

    cdef uint64_t* word_at(self, uint64_t number) except NULL:
        if number >= <uint64_t>(self.base + self.size - <char*>self.records) // sizeof(uint64_t):
            raise IndexError(f"an extent of {self.size} bytes has no word {number}")
        return self.records + number

    def word(self, uint64_t number):
        """The value of one of the words."""
        return load_acquire(self.word_at(number))

    def replace_word(self, uint64_t number, uint64_t seen, uint64_t value):
        """Replace the value `seen` of a word, by one CAS. False if another value is there."""
        return cas_acq_rel(self.word_at(number), seen, value)


# In seconds. A state is ahead of now by at most two of the longest periods and a quantum. With this limit on the time,
# no state reaches TIME_BITS.
cdef object LAST_PYTHON_S = (2**62 - 3 * MAX_PERIOD_NS) // 10**9


@cython.final
cdef class Segment:
    """The mapping of a segment whose header has been validated.

    The constructor takes an open file descriptor and the header's fields; it keeps no reference to the file. The
    mapping lives as long as the object, and limiters hold the object, so no decision touches unmapped memory.

    Thread-safe. After a fork the child has the same mapping of the same memory.
    """

    def __cinit__(
        self, int fd, *, size_t size, uint64_t group_count, uint64_t epoch_ns, uint64_t wall_epoch_ns, int clock_kind,
        tuple hash_key, object on_full, bint is_writable,
    ):
        if size != layout.TABLE_OFFSET + group_count * layout.GROUP_BYTES:
            raise ValueError(f"{size} bytes do not hold {group_count} groups")
        self.base = map_aligned(fd, size, is_writable)
        self.size = size
        self.is_writable = is_writable
        self.table.cells = <ForebayCell*>(self.base + <size_t>layout.TABLE_OFFSET)
        self.table.group_count = group_count
        self.table.epoch_ns = epoch_ns
        if <uint64_t>clock_kind == FOREBAY_CLOCK_MONOTONIC:
            self.wall_epoch_ns = wall_epoch_ns
        else:
            # A manual clock and Python's clock show wall clock time, so the offset to the wall clock stays 0.
            self.table.manual_ns = &(<ForebayHeader*>self.base).manual_ns
        self.follows_python = <uint64_t>clock_kind == FOREBAY_CLOCK_PYTHON
        self.table.line_mask = <uint64_t>(FOREBAY_LINES_PER_GROUP - 1)
        self.table.on_full = {None: EVICT, "evict": EVICT, "deny": DENY, "allow": ALLOW}[on_full]
        self.hash_key.k0, self.hash_key.k1 = hash_key
        self.moves.home.progress = &(<ForebayHeader*>self.base).resize_progress
        self.moves.home.follow = follow_resize
        self.moves.base = self.base
        self.moves.made_bytes = size
        self.moves.hash_key = self.hash_key
        self.table.home = &self.moves.home
        self.forks = forks_counter()
        self.name_check_due_ns = coarse_ns() + NAME_CHECK_NS

    def __dealloc__(self):
        cdef View* view = self.moves.views
        while view != NULL:
            self.moves.views = view.before
            munmap(view.base, view.size)
            free(view)
            view = self.moves.views
        if self.base != NULL:
            munmap(self.base, self.size)

    def know_file(self, bytes path not None, uint64_t device, uint64_t inode):
        """Where the segment's file is: there this process may end the resize of a process that has died."""
        if self.is_writable:
            self.path = path
            self.moves.device = device
            self.moves.inode = inode
            self.moves.path = PyBytes_AS_STRING(path)

    def moved_keys(self):
        """The live keys that the table was made for by a resize; 0 if none has moved it."""
        return load_acquire(&header_of(&self.moves).moved_keys) if self.moved_table() else 0

    def moved_table(self):
        """Where a resize has moved the table, as in the header."""
        return load_acquire(&header_of(&self.moves).moved_table)

    def move_table(self, Extent target not None, uint64_t place):
        """Make `target`, at that place, the table: see moving.pxd. The caller has the mover's lock.

        Returns how many live keys there were, and for how many of them it has no room; then the table stays. All of it
        without the GIL, as threads that have it may wait for this.
        """
        cdef ForebayHeader* header = header_of(&self.moves)
        cdef uint64_t now_place = load_acquire(&header.moved_table)
        cdef uint64_t live = 0, without_room, check = check_of(&self.moves, place, target.keys)
        # Its own place is where the file ended before.
        if load_acquire(&header.resize_progress) & 1:
            mend_check(&self.moves, now_place, offset_of(place))
        if now_place != self.table.place and not use_place(&self.table, &self.moves, now_place):
            raise OSError(errno, "cannot map the table")
        with nogil:
            without_room = move_cells(&self.table, &target.table, header, place, target.keys, check, &live)
        return live, without_room

    def note_hot_keys(self, Extent extent not None):
        """From now on, note the keys of this process's decisions in that extent. Before any limiter is made."""
        self.hot_extent = extent
        self.hot_keys.lines = extent.used_cells // FOREBAY_CELLS_PER_LINE
        # Of each cell one slot. Damage may have left less than a line of them.
        if self.hot_keys.lines != 0:
            self.hot_keys.denied = <ForebayCell*>extent.records
            self.hot_keys.allowed = self.hot_keys.denied + extent.used_cells

    def mark_closed(self):
        """Tell threads that decide without the GIL, once `next_generation` is called, that the store was closed."""
        store_release(&self.closed, 1)

    cdef int follow_python(self) except -1:
        """Advance the segment's time to ``time.time()``, if that is later and this process may write."""
        cdef uint64_t python_ns, seen_ns
        if not self.is_writable:
            return 0
        seconds = time.time()
        if not 0 <= seconds <= LAST_PYTHON_S:
            raise ValueError(f"time.time() says {seconds!r}: a segment's time is from 1970 to 2086")
        # Today a double resolves seconds since 1970 to less than a microsecond, but not to a nanosecond.
        python_ns = round(seconds * 1e6) * 1000
        seen_ns = load_acquire(self.table.manual_ns)
        while seen_ns < python_ns and not cas_acq_rel(self.table.manual_ns, seen_ns, python_ns):
            seen_ns = load_acquire(self.table.manual_ns)
        return 0

    cdef ForebayCounterLine* counter_line(self, size_t number) except NULL:
        if number >= <size_t>(layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY):
            raise IndexError(f"there is no counter line {number}")
        return <ForebayCounterLine*>(self.base + <size_t>layout.COUNTERS_OFFSET) + number

    cdef ForebayCounterLine* shared_counter_line(self, size_t limiter) except NULL:
        return self.counter_line(<size_t>layout.OWNED_COUNTER_LINES + limiter)

    def limiter_number(self, bytes name, uint32_t algorithm, *, bint add=True):
        """The number of the limiter with this name and algorithm; -1 if the list has no room for it.

        Adds a new limiter to the list. Without `add` it writes nothing, and returns the number that a new limiter would
        get now.

        Lock-free: one CAS claims an entry for the limiter's identity. Two limiters whose 64-bit keyed hashes collide
        would share an entry; the odds are one in 10**14 for a full list.
        """
        cdef uint64_t identity = self.identity_of(name + b"\0" + algorithm.to_bytes(4, "little"))
        cdef ForebayLimiterEntry* entries = <ForebayLimiterEntry*>(self.base + <size_t>layout.LIMITERS_OFFSET)
        cdef ForebayLimiterEntry* entry
        cdef int number
        for number in range(layout.LIMITER_CAPACITY):
            entry = &entries[number]
            if load_acquire(&entry.identity) == 0:
                if not add:
                    return number
                cas_acq_rel(&entry.identity, 0, identity)
            if load_acquire(&entry.identity) == identity:
                # SYNC name -> length: a process that reads a length reads the algorithm and the whole name. A killed
                # writer leaves 0.
                if add and load_acquire32(&entry.name_bytes) == 0:
                    entry.algorithm = algorithm
                    memcpy(entry.name, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
                    store_release32(&entry.name_bytes, <uint32_t>PyBytes_GET_SIZE(name))
                return number
        return -1

    def secret(self, bytes purpose):
        """16 bytes derived from the segment's hash key: equal in all its processes. They don't reveal the hash key."""
        cdef ForebayHashKey key = derive_key(self.hash_key, b"secret " + purpose)
        return key.k0.to_bytes(8) + key.k1.to_bytes(8)

    def identity_of(self, bytes text):
        """The keyed hash of `text`, by which the list of limiters or of extents is searched."""
        return siphash13(
            self.hash_key, <const uint8_t*>PyBytes_AS_STRING(text), <size_t>PyBytes_GET_SIZE(text)) | 1

    def extent_entry(self, uint64_t identity):
        """The bytes of the extent entry with this identity; None if there is none."""
        cdef ForebayExtentEntry* entries = <ForebayExtentEntry*>(self.base + <size_t>layout.EXTENTS_OFFSET)
        cdef int number
        for number in range(layout.EXTENT_CAPACITY):
            # SYNC entry -> identity: a process that reads an identity reads the whole entry. A killed writer leaves 0.
            if load_acquire(&entries[number].identity) == identity:
                return PyBytes_FromStringAndSize(<char*>&entries[number], sizeof(ForebayExtentEntry))
        return None

    def publish_extent(self, int number, bytes entry):
        """Publish an extent to every process. The caller holds the list's lock and has written the extent's bytes."""
        cdef ForebayExtentEntry* place = (
            <ForebayExtentEntry*>(self.base + <size_t>layout.EXTENTS_OFFSET) + number)
        cdef ForebayExtentEntry made
        cdef uint64_t identity
        if PyBytes_GET_SIZE(entry) != sizeof(ForebayExtentEntry) or not 0 <= number < layout.EXTENT_CAPACITY:
            raise ValueError(f"no entry {number} of a list of extents, of {PyBytes_GET_SIZE(entry)} bytes")
        memcpy(&made, PyBytes_AS_STRING(entry), sizeof(ForebayExtentEntry))
        identity = made.identity
        made.identity = 0
        place[0] = made
        # SYNC entry -> identity: see extent_entry.
        store_release(&place.identity, identity)

    def map_extent(
        self, int fd, *, uint64_t offset, uint64_t keys, uint64_t group_count, uint64_t used_cells, uint64_t word_count,
    ):
        """Map an extent of the segment's file."""
        return Extent(
            self, fd, offset=offset, keys=keys, group_count=group_count, used_cells=used_cells, word_count=word_count)

    def extents_maker(self):
        """The attachment id of the process that is changing the list of extents, or died doing so; 0 for none."""
        return load_acquire(&(<ForebayHeader*>self.base).extents_maker)

    def replace_extents_maker(self, uint64_t seen, uint64_t maker):
        """Replace the maker `seen` by `maker`, by one CAS. False if another value is there."""
        return cas_acq_rel(&(<ForebayHeader*>self.base).extents_maker, seen, maker)

    def rules_version(self):
        """The number of the live rules in force; 0 if none were published."""
        # SYNC published file -> version: a process that reads a version finds its whole file.
        return load_acquire(self.rules_word())

    def replace_rules_version(self, uint64_t seen, uint64_t version):
        """Replace the version `seen` by another, by one CAS. False if another value is there."""
        return cas_acq_rel(self.rules_word(), seen, version)

    cdef uint64_t* rules_word(self) noexcept:
        return &(<ForebayHeader*>self.base).rules_version

    def note_decision_latency(self, uint64_t took_ns):
        """Count a decision of a web request by the time that it took."""
        self.note_latency((<ForebayHeader*>self.base).decision_latency, took_ns)

    def note_redis_latency(self, uint64_t took_ns):
        """Count a call that Redis replied to by the time that it took."""
        self.note_latency((<ForebayHeader*>self.base).redis_latency, took_ns)

    cdef void note_latency(self, uint64_t* histogram, uint64_t took_ns) noexcept:
        cdef uint64_t bound_ns = FOREBAY_LATENCY_LEAST_NS
        cdef int bucket = 0
        if not self.is_writable:
            return
        while bucket < FOREBAY_LATENCY_BUCKETS - 1 and took_ns > bound_ns:
            bound_ns *= 4
            bucket += 1
        fetch_add_relaxed(&histogram[bucket], 1)
        fetch_add_relaxed(&histogram[FOREBAY_LATENCY_BUCKETS], took_ns)

    def take_counter_line(self, size_t number, uint32_t limiter):
        """Assign an unused line to `limiter`. Whether the line is that limiter's now. The caller holds its lock."""
        cdef ForebayCounterLine* line = self.counter_line(number)
        if line.limiter == 0:
            line.limiter = limiter + 1
        return line.limiter == limiter + 1

    def read(self, size_t offset, size_t size):
        """A copy of the `size` bytes at `offset`."""
        if offset > self.size or size > self.size - offset:
            raise IndexError(f"{size} bytes at {offset} are not in a segment of {self.size}")
        return PyBytes_FromStringAndSize(self.base + offset, size)

    def now_ns(self):
        """The segment's time in nanoseconds."""
        if self.follows_python:
            self.follow_python()
        return table_now(&self.table)

    def set_manual_ns(self, uint64_t now_ns):
        """Set the time of a segment with a manual clock, for every process that has it attached."""
        if self.table.manual_ns == NULL or self.follows_python:
            raise ValueError("this segment's clock isn't moved by hand")
        store_release(self.table.manual_ns, now_ns)

    def put_copies(self, bytes copies, *, bint in_place):
        """Put copies of keys, of which each is its cell's number, its tag and its state, into a table of its own.

        With `in_place` into the same cells, which a table of the same size has; else as insertion does. The number that
        had no room. Only for the segment's creator, before other processes can find it.
        """
        return put_copies(&self.table, NULL, 0, copies, in_place)

    def count_live(self):
        """The number of keys whose state hasn't expired. Reads the whole table: some ms per million keys."""
        cdef uint64_t live, now_ns = self.now_ns()
        # A view of its own: another thread may follow a resize meanwhile.
        cdef Table own = self.table
        with nogil:
            live = table_count_live(&own, now_ns)
        return live
