"""Publication: one process of a host replaces the rules of all its processes, at one moment.

State
-----
A word of the segment, `rules_version`: the number of the version in force, 0 before the first. For each published
version a file beside the segment, whose name ends with the number. It has a keyed hash, a `Publication`, and the
document. The key is a secret of the segment, and the name has another one: so the files of a segment that was removed
are not those of its successor.

Transitions
-----------
* *prepare*: ``publish`` makes the file of the next number for which there is none, exclusively, and writes all of it.
  It doesn't if the path leads to a segment that was restored from a snapshot of its own: that has the same names for
  its files.
* *switch*: one CAS of the word, from the version that the new one was made for to the new number.
* *take over*: a process that reads another number than the one it follows reads that file, and then the word again. If
  the word still has the number, it makes gates of the file. Otherwise it begins again.
* *clean*: the process that has switched removes the files of smaller numbers.

Invariant
---------
The file of the number that the word has is whole and never changes. Each request is decided by rules of one version.

Proof
-----
A file is only written by the process that has made it, and before that process stores its number; *switch* releases
what *prepare* wrote, and a reader acquires it with the number. Nobody makes a file that exists, so two processes that
both take themselves for the loader prepare different numbers, and one of their CASes fails. A number that was in force
once never is again, as numbers only grow: a CAS stores a number above the one it replaces. *clean* removes only numbers
below one that was in force, so never the word's. A reader whose file was removed reads a newer number. So does one that
reads a file of a removed number, which a process that was stopped before *prepare* has made: its CAS fails.

Each gate is made of the rules of one version, and a request holds one gate from its entry to its cleanup: see
``LiveGate``. All requests that enter after the CAS read the new number.

Crash and stall
---------------
A process that is killed before its CAS leaves a file that no word names. The next publication takes the number behind
it, and removes it. One that is killed after the CAS leaves the new version in force, and perhaps old files, which the
next one removes. A process that is stopped before the CAS finds another number when it goes on, and gives up. One that
is stopped as the loader delays new versions, and no request.

Not handled
-----------
A file that was changed or removed by others: a process that has not read it yet keeps its rules, and says so. A process
that reads a removed segment's version keeps its rules, too. A process that is stopped between *prepare* and *clean*
while its segment is removed, and restored from a snapshot, may remove the file of the new one's version when it goes
on. Numbers end after 2**64 versions.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import tempfile
import weakref
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final, Literal

from forebay.errors import ForebayError
from forebay.extras import Needs
from forebay.rules.live.standing import Standing
from forebay.segment.header import Header
from forebay.segment.layout import HEADER, HEADER_OFFSET
from forebay.segment.names import RULES_SECRET, rules_prefix

with Needs("rules", __name__):
    import msgspec
    from msgspec import Struct

__all__ = ["Board", "Publication", "UnreadableRules"]

DIGEST_BYTES: Final = 32
MOST_BYTES: Final = 2**23
MOST_LEFT_OVER: Final = 10_000
"""Files that no word names, in a row."""


class UnreadableRules(ForebayError):
    """The published rules of a segment can't be read."""


class Publication(Struct, frozen=True):
    """A version of the rules."""

    name: str
    """The document's name, as messages have it; its end says whether it is TOML or YAML."""
    source: str
    """Where it came from, in words."""
    loader: int
    """The process that published it."""
    since: datetime
    limits: dict[str, Standing]
    """The standing of each limit's state."""
    document: bytes


class Board:
    """The published rules of one segment. *Threads*, *fork*: safe; it has no state but the segment's and files."""

    def __init__(self, store: Any) -> None:
        """`store` is a ``Store``; beside a private one's memory, the files are in the directory for temporary ones."""
        self.segment = store.segment
        self._attachment = store.attachment
        self.path: str | None = store.path
        """The segment's file."""
        self._key = self.segment.secret(b"live rules")
        secret = self.segment.secret(RULES_SECRET)
        if self.path is None:
            self._prefix = os.path.join(tempfile.gettempdir(), f"forebay-rules-{secret.hex()}.")
            weakref.finalize(store, _remove_all, self._prefix, os.getpid())
        else:
            self._prefix = rules_prefix(self.path, secret)
        self.note_path = f"{self._prefix}loader"
        """The file of what the loader has to say."""

    @property
    def version(self) -> int:
        """The version in force; 0 if there is none."""
        version: int = self.segment.rules_version()
        return version

    def read(self, version: int) -> Publication:
        """The publication of the version that is in force. Raises ``UnreadableRules``, also if it isn't any more."""
        try:
            with open(self._path_of(version), "rb") as file:
                raw = file.read(MOST_BYTES)
        except OSError as error:
            raise UnreadableRules(f"version {version} of the rules can't be read: {error}") from error
        if self.version != version:
            raise UnreadableRules(f"version {version} of the rules was replaced by version {self.version}")
        if raw[:DIGEST_BYTES] != self._digest(raw[DIGEST_BYTES:]):
            raise UnreadableRules(f"{self._path_of(version)} isn't what was published as version {version}")
        try:
            return msgspec.msgpack.decode(raw[DIGEST_BYTES:], type=Publication)
        except msgspec.MsgspecError as error:
            raise UnreadableRules(f"version {version} was published by another forebay: {error}") from error

    def publish(self, publication: Publication, seen: int) -> int | None:
        """Put a version in force instead of `seen`, and return its number. None if `seen` isn't in force any more.

        Raises ``OSError``, also if the segment was removed.
        """
        self._refuse_restored()
        body = msgspec.msgpack.encode(publication)
        version = self._prepare(seen, self._digest(body) + body)
        if not self.segment.replace_rules_version(seen, version):
            # The process that has won may have removed it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path_of(version))
            return None
        self._clean(version)
        return version

    def write_note(self, note: bytes) -> None:
        """Replace the note of the loader. Raises ``OSError``, also if the segment was removed."""
        self._refuse_restored()
        path = f"{self.note_path}.new"
        self._write(path, note, "wb")
        try:
            os.replace(path, self.note_path)
        except PermissionError:
            # That of another user of the segment, in a directory such as /dev/shm. A reader may find a part of it.
            os.unlink(path)
            with open(self.note_path, "r+b") as file:
                file.write(note)
                file.truncate()

    def _refuse_restored(self) -> None:
        """Raises ``FileNotFoundError`` if the path has no file, or a segment with the same names for its own files."""
        if self.path is None or self._attachment.is_in_place():
            return
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            there, ours = file.read(HEADER.size), self._attachment.read_file(HEADER_OFFSET, HEADER.size)
            if len(there) < HEADER.size or Header.unpack(there).hash_key != Header.unpack(ours).hash_key:
                return
        raise FileNotFoundError(errno.ENOENT, "the store was removed: restart its processes", self.path)

    def _prepare(self, seen: int, data: bytes) -> int:
        for version in range(seen + 1, seen + 1 + MOST_LEFT_OVER):
            with contextlib.suppress(FileExistsError):
                self._write(self._path_of(version), data, "xb")
                return version
        raise FileExistsError(errno.EEXIST, "too many files were left over", self._prefix)

    def _write(self, path: str, data: bytes, mode: Literal["wb", "xb"]) -> None:
        """Write a file for all who may use the segment. It is whole, or there is none."""
        with open(path, mode, opener=_for_this_user) as file:
            try:
                if self.path is not None:
                    status = os.stat(self.path)
                    with contextlib.suppress(PermissionError):
                        os.fchown(file.fileno(), -1, status.st_gid)
                        os.fchmod(file.fileno(), status.st_mode & 0o660)
                file.write(data)
                file.flush()
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise

    def _clean(self, version: int) -> None:
        """Remove the files of older versions."""
        for path in glob.iglob(f"{glob.escape(self._prefix)}*"):
            number = path.removeprefix(self._prefix)
            if re.fullmatch("[0-9]+", number) and int(number) < version:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _path_of(self, version: int) -> str:
        return f"{self._prefix}{version}"

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=DIGEST_BYTES).digest()


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _remove_all(prefix: str, pid: int) -> None:
    if os.getpid() == pid:
        for path in glob.iglob(f"{glob.escape(prefix)}*"):
            with contextlib.suppress(OSError):
                os.unlink(path)
