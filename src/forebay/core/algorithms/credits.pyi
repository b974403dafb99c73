from typing import NoReturn, Self, TypeVar, final, overload

from forebay.core.cell_limiter import CellLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.store import Store

_L = TypeVar("_L")

@final
class Credits(CellLimiter):
    """Prepaid permits: a key has as many as ``add`` gave it, and no time brings more.

    ``Credits(store, "api calls")``, and ``add(key, 1000)`` once the customer has paid. A key begins with none. A
    request that costs more than the key's balance is denied, not an error. A decision's ``limit`` and ``remaining`` are
    the balance after it; its ``reset_after``, and ``retry_after`` of a denial, are infinity. ``wait`` returns False at
    once if the balance is too low, and ``limited`` raises ``LimitExceeded`` then.

    The store never evicts a key that has a balance, and such a key keeps its cell until the balance is spent: make the
    store for as many keys. A store in shared memory is no ledger: a reboot of the host, or ``Store.unlink``, loses all
    balances. Over Redis they last as long as Redis keeps its data.

    Raises ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``. A decision is O(1),
    usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per key. Guarantee: a key
    is never charged more permits than were added or given back to it, over all processes.
    """
    @overload
    def __new__(cls, store: Store, name: str) -> Self: ...
    @overload
    def __new__(cls, store: MakesLimiters[Credits, _L], name: str) -> _L: ...  # type: ignore[misc]
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    def add(self, key: Key, permits: int) -> int:
        """Give `key` so many permits more. Returns its balance.

        Raises ``InvalidCost`` if `permits` is no whole number of at least 0, or if the balance would be above
        281,474,976,710,655; ``StoreFull`` if there is no room for a new key; ``InvalidKey`` and ``StoreClosed``. Then
        nothing was added. O(1), one CAS: a process that is killed has added all or nothing, and permits that several
        add at once are all there.
        """
    def reset(self, key: Key) -> NoReturn:
        """Raises ``InvalidLimiter``: to forget a key would delete what it has paid for.

        ``take_up_to(key, 2**48)`` takes the whole balance, and returns how much that was.
        """
