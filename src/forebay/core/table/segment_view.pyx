"""The mappings of a segment and its extents, and the segment's clock."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from forebay.core.table.keys cimport derive_key
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_CLOCK_MONOTONIC, FOREBAY_CLOCK_PYTHON, FOREBAY_KIND_BLOCKED,
    FOREBAY_LINES_PER_GROUP, ForebayCell, ForebayCounterLine, ForebayExtentEntry, ForebayHeader,
    ForebayLimiterEntry, cas_acq_rel, coarse_ns, load_acquire, load_acquire32, siphash13, store_release,
    store_release32,
)
from forebay.core.table.table cimport ALLOW, DENY, EVICT, table_count_live, table_now
from forebay.core.table.threads cimport forks_counter
from forebay.segment.mapping cimport map_aligned

import time

from forebay.rate import MAX_PERIOD_NS
from forebay.segment import layout


cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ, PROT_WRITE, MAP_SHARED
    void* MAP_FAILED
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t size)


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
        self.forks = forks_counter()
        self.name_check_due_ns = coarse_ns() + NAME_CHECK_NS

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.size)

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

    def count_live(self):
        """The number of keys whose state hasn't expired. Reads the whole table: some ms per million keys."""
        cdef uint64_t live, now_ns = self.now_ns()
        with nogil:
            live = table_count_live(&self.table, now_ns)
        return live
