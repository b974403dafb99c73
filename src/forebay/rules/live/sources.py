"""Where the document of live rules is: a file, a row of an SQL table, or a key of Redis."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import secrets
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from forebay.errors import ForebayError, InvalidLimiter, redacted_repr, short_repr
from forebay.extras import Needs
from forebay.rules.reading import MOST_BYTES

__all__ = ["FileSource", "RedisSource", "Source", "SourceChanged", "SourceGone", "SqlSource", "source_at"]

TIMEOUT_S: Final = 5.0
TABLE: Final = "forebay_rules"
_TABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?", re.ASCII)

Syntax: TypeAlias = Literal["toml", "yaml"]


class SourceGone(ForebayError):
    """The document of live rules isn't where it should be."""


class SourceChanged(ForebayError):
    """The source has another document than the one that was to be replaced."""

    def __init__(self, label: str) -> None:
        super().__init__(f"{label} has changed meanwhile, so nothing was written: look at it, and try again")


class Source(ABC):
    """A document of live rules. A class of your own has ``read``, ``name`` and ``label``, and ``write`` for commands.

    ``read`` and ``write`` are called by one thread of one process of a host at a time.
    """

    name: str
    """The document's name in messages; it ends with ``.toml``, ``.yaml`` or ``.yml``, which says its syntax."""
    label: str
    """The source's name in the status and the log, without a password."""
    is_whole: bool = True
    """Whether ``read`` never returns a part of a document that is being written."""

    @abstractmethod
    def read(self) -> bytes:
        """The document. Raises any error if it can't be had: the last good rules stay in force then."""

    def write(self, document: bytes, *, instead_of: bytes | None = None) -> None:
        """Replace the document, at one moment. Raises any error if it can't.

        `instead_of`: raises ``SourceChanged``, and writes nothing, if the source has another document than this.
        """
        raise NotImplementedError(f"{self.label} can't be written")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"


class FileSource(Source):
    """The file of a path, TOML or YAML. The file, or a link on the way, may be replaced or removed at any time.

    A changed file counts once two readings have found the same: it may be written in steps, and a part of a document
    may be a valid one, with fewer rules.
    """

    is_whole = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.name = self.label = str(self.path)

    def read(self) -> bytes:
        # Neither a pipe nor a terminal may block the loader, nor a large file take its memory.
        with open(self.path, "rb", opener=_without_blocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SourceGone(f"{self.path} is no regular file")
            return file.read(MOST_BYTES + 1)

    def write(self, document: bytes, *, instead_of: bytes | None = None) -> None:
        """Replace the file by another one of its owner and mode, as far as this user may.

        With `instead_of` it is compared and replaced under a lock of the directory, which only these calls take.
        """
        target = self.path.resolve()
        with _lock_of(target.parent):
            if instead_of is not None and self.read() != instead_of:
                raise SourceChanged(self.label)
            self._replace(target, document)

    def _replace(self, target: Path, document: bytes) -> None:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(path, "xb") as file:
                with contextlib.suppress(FileNotFoundError):
                    _make_like(file.fileno(), target.stat())
                file.write(document)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, target)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextlib.contextmanager
def _lock_of(directory: Path) -> Iterator[None]:
    if not hasattr(os, "fchown"):
        # Windows has no such locks.
        yield
        return
    import fcntl

    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_like(fd: int, status: os.stat_result) -> None:
    """Give a file the owner and the mode of another one, so that the same users may read it."""
    if not hasattr(os, "fchown"):
        return
    for owner in ((-1, status.st_gid), (status.st_uid, -1)):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, *owner)
    os.fchmod(fd, stat.S_IMODE(status.st_mode))


class RedisSource(Source):
    """The value of a key of Redis. `server` is a URL, or a client of redis-py, which has its own timeouts.

    Needs ``forebay[redis]``. *Fork*: safe, as redis-py's clients are.
    """

    def __init__(self, server: Any, key: str, *, syntax: Syntax = "toml") -> None:
        if not isinstance(key, str) or not key:
            raise InvalidLimiter(f"key is the name of a key, not {short_repr(key)}")
        if isinstance(server, str):
            with Needs("redis", __name__):
                import redis
            self._client: Any = redis.Redis.from_url(
                server, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=False
            )
        elif callable(getattr(server, "get", None)) and not _is_awaited(server):
            self._client = server
        else:
            raise InvalidLimiter(
                f"server is a URL or a client of redis-py, which isn't awaited, not {redacted_repr(server)}"
            )
        self._key = key
        self.label = f"key {key!r} of Redis"
        self.name = _named(f"redis:{key}", syntax)

    def read(self) -> bytes:
        return self._document(self._client.get(self._key))

    def _document(self, value: Any) -> bytes:
        if value is None:
            raise SourceGone(f"Redis has no key {self._key!r}")
        return value.encode() if isinstance(value, str) else bytes(value)

    def write(self, document: bytes, *, instead_of: bytes | None = None) -> None:
        def replace(pipeline: Any) -> None:
            # It watches the key, and begins again if that changes before the end.
            if instead_of is not None and self._document(pipeline.get(self._key)) != instead_of:
                raise SourceChanged(self.label)
            pipeline.multi()
            pipeline.set(self._key, document)

        self._client.transaction(replace, *([] if instead_of is None else [self._key]))


def _is_awaited(client: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(client, "execute_command", None))


class SqlSource(Source):
    """A row of an SQL table, through SQLAlchemy: `engine` is a URL, or an ``Engine``, which has its own timeouts.

    A database that doesn't answer within 5 seconds is as one that is gone; until it does, it is asked nothing else.

    The table has two columns of text: ``name``, its primary key, and ``document``. ``create_table`` makes it. `row` is
    the name of the document's row. Needs ``forebay[sql]`` and the database's driver. *Fork*: safe; a child opens
    connections of its own.
    """

    def __init__(self, engine: Any, *, table: str = TABLE, row: str = "rules", syntax: Syntax = "toml") -> None:
        if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
            raise InvalidLimiter(f"table is the name of a table, perhaps with its schema, not {short_repr(table)}")
        if not isinstance(row, str) or not row:
            raise InvalidLimiter(f"row is the name of a row, not {short_repr(row)}")
        with Needs("sql", __name__):
            import sqlalchemy
        self._has_timeouts = not isinstance(engine, str)
        self._unanswered: threading.Thread | None = None
        if isinstance(engine, str):
            # Each reading has a connection of its own: none is shared with a child, or is stale after an hour.
            try:
                engine = sqlalchemy.create_engine(engine, poolclass=sqlalchemy.pool.NullPool)
            except ModuleNotFoundError as error:
                message = f"the driver of the URL's database is missing: install it: {error}"
                raise ModuleNotFoundError(message, name=error.name) from error
        elif not isinstance(engine, sqlalchemy.Engine):
            raise InvalidLimiter(f"engine is a URL or an Engine of SQLAlchemy, not {redacted_repr(engine)}")
        schema, _, name = table.rpartition(".")
        self._engine, self._row, self._pid = engine, row, os.getpid()
        self._sql: Any = sqlalchemy
        self._table = sqlalchemy.Table(
            name,
            sqlalchemy.MetaData(),
            sqlalchemy.Column("name", sqlalchemy.String(100), primary_key=True),
            sqlalchemy.Column("document", sqlalchemy.Text, nullable=False),
            schema=schema or None,
        )
        self.label = f"row {row!r} of the SQL table {table}"
        self.name = _named(f"{table}:{row}", syntax)

    def create_table(self) -> None:
        """Make the table, if it isn't there."""
        self._table.create(self._own_engine(), checkfirst=True)

    def read(self) -> bytes:
        return self._read() if self._has_timeouts else self._answer_of(self._read)

    def _answer_of(self, ask: Callable[[], bytes]) -> bytes:
        """The result of `ask`, within a deadline: drivers differ in their timeouts, and some have none."""
        answers: list[bytes | BaseException] = []

        def run() -> None:
            try:
                answers.append(ask())
            except BaseException as error:
                answers.append(error)

        if self._unanswered is None or not self._unanswered.is_alive():
            self._unanswered = threading.Thread(target=run, name="forebay-sql", daemon=True)
            self._unanswered.start()
            self._unanswered.join(TIMEOUT_S)
        if not answers:
            raise SourceGone(f"its database doesn't answer within {TIMEOUT_S:g} s")
        [answer] = answers
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _read(self) -> bytes:
        query = self._sql.select(self._table.c.document).where(self._table.c.name == self._row)
        with self._table_missing(), self._own_engine().connect() as connection:
            document = connection.execute(query).scalar_one_or_none()
        if document is None:
            raise SourceGone(f"the SQL table {self._table.fullname} has no row {self._row!r}")
        return str(document).encode()

    def write(self, document: bytes, *, instead_of: bytes | None = None) -> None:
        values = {"document": document.decode()}
        update = self._table.update().where(self._table.c.name == self._row).values(values)
        if instead_of is not None:
            update = update.where(self._table.c.document == instead_of.decode())
        with self._table_missing(), self._own_engine().begin() as connection:
            if connection.execute(update).rowcount == 0:
                if instead_of is not None:
                    raise SourceChanged(self.label)
                connection.execute(self._table.insert().values(name=self._row, **values))

    @contextlib.contextmanager
    def _table_missing(self) -> Iterator[None]:
        """Raises ``SourceGone`` for a database's error that is due to a missing table."""
        try:
            yield
        except self._sql.exc.DBAPIError:
            inspector = self._sql.inspect(self._own_engine())
            if inspector.has_table(self._table.name, schema=self._table.schema):
                raise
            remedy = f"make it by create_table() of SqlSource(url, table={self._table.fullname!r})"
            raise SourceGone(f"there is no SQL table {self._table.fullname!r}: {remedy}") from None

    def _own_engine(self) -> Any:
        """The engine, which a forked child has without its parent's connections."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine


def source_at(text: str) -> Source:
    """A source for commands: a path, ``redis://HOST/0#KEY``, or an SQLAlchemy URL with ``#ROW`` or ``#TABLE:ROW``.

    Raises ``InvalidLimiter``.
    """
    scheme, colon, _ = text.partition("://")
    if not colon:
        return FileSource(text)
    url, _, fragment = text.rpartition("#") if "#" in text else (text, "", "")
    name, syntax = _syntax_of(fragment)
    if scheme in ("redis", "rediss", "unix"):
        if not name:
            raise InvalidLimiter("the URL of a key of Redis ends with #KEY")
        return RedisSource(url, name, syntax=syntax)
    try:
        urlsplit(url)
    except ValueError as error:
        raise InvalidLimiter(f"the URL of an SQL database can't be read: {error}") from None
    table, colon, row = name.rpartition(":")
    return SqlSource(url, table=table or TABLE, row=row or "rules", syntax=syntax)


def _syntax_of(fragment: str) -> tuple[str, Syntax]:
    """A name, and the syntax that it ends with."""
    for syntax in ("toml", "yaml"):
        if fragment.endswith(f".{syntax}"):
            return fragment, syntax
    return fragment, "toml"


def _named(place: str, syntax: object) -> str:
    if syntax not in ("toml", "yaml"):
        raise InvalidLimiter(f'syntax is "toml" or "yaml", not {short_repr(syntax)}')
    return place if place.endswith(f".{syntax}") else f"{place}.{syntax}"
