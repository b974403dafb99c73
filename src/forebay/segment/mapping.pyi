from typing import Self, final

from typing_extensions import Buffer

@final
class HeldBytes:
    """The bytes of an object with the buffer protocol, as a mapping has: they stay where they are while this exists.

    Typed memoryviews would do the same, and add 40 kB of Cython's code to the wheel.
    """

    def __new__(cls, memory: Buffer) -> Self: ...

def use_huge_pages(fd: int, size: int) -> None: ...
def is_in_memory(fd: int) -> bool: ...
