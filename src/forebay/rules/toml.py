"""TOML with the places of its words and values. ``tomllib`` reads the data, and has no places.

So a scanner walks over text that ``tomllib`` has accepted: it has to recognize the parts of valid TOML only.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from typing import Any, Final

from forebay.rules.places import Document, InvalidSyntax, Path, Place, at

__all__ = ["read_toml"]

_SPACE: Final = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_STRING: Final = r'"""(?:\\.|[^\\])*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:\\.|[^"\\])*"' + r"|'[^']*'"
_KEY: Final = re.compile(rf"{_STRING}|[A-Za-z0-9_-]+", re.DOTALL)
# A time may follow its date after a space.
_SCALAR: Final = re.compile(rf"{_STRING}|[^\s,\]}}#]+(?: \d\d:[^\s,\]}}#]+)?", re.DOTALL)
_NO_KEY: Final = re.compile(rf"#[^\n]*|{_STRING}", re.DOTALL)
# Far more than any table of a rule file has. The time and memory of a dotted key grow with the square of its words.
_LONG_KEY: Final = re.compile(r"(?:\.[^.,=\[\]{}\n]*){32}")
_ERROR_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def read_toml(text: str) -> Document:
    """Raises ``InvalidSyntax``."""
    text = text.replace("\r\n", "\n")
    if _LONG_KEY.search(_NO_KEY.sub(" ", text)):
        raise RecursionError
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(text, str(error)) from None
    except ValueError as error:
        # Python refuses to read a number of thousands of digits.
        raise InvalidSyntax(Place(1, 1), f"a value can't be read: {error}") from None
    scanner = _Scanner(text)
    scanner.scan()
    return Document(data, scanner.words, scanner.values)


def _syntax_error(text: str, message: str) -> InvalidSyntax:
    found = _ERROR_PLACE.search(message)
    if found is None:
        return InvalidSyntax(Place(1, 1), message)
    place = Place(int(found[1]), int(found[2])) if found[1] else at(text, len(text))
    return InvalidSyntax(place, message[: found.start()])


class _Scanner:
    def __init__(self, text: str) -> None:
        self.words: dict[Path, Place] = {}
        self.values: dict[Path, Place] = {(): Place(1, 1)}
        self._text = text
        self._at = 0
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._sizes: dict[Path, int] = {}
        """The number of tables in each array of tables so far."""

    def scan(self) -> None:
        table: Path = ()
        while self._skip_space() < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        place = self._here()
        is_array = self._text.startswith("[[", self._at)
        self._at += 1 + is_array
        *before, last = self._key()
        self._at += 1 + is_array
        table: Path = ()
        for word, word_place in before:
            table = self._opened((*table, word), word_place)
        path = (*table, last[0])
        self.words.setdefault(path, last[1])
        self.values.setdefault(path, place)
        if not is_array:
            return path
        self._sizes[path] = self._sizes.get(path, 0) + 1
        path = (*path, self._sizes[path] - 1)
        self.values[path] = place
        return path

    def _opened(self, path: Path, place: Place) -> Path:
        """The table at a path: of an array of tables, the last one."""
        self.words.setdefault(path, place)
        self.values.setdefault(path, place)
        return (*path, self._sizes[path] - 1) if path in self._sizes else path

    def _pair(self, table: Path) -> None:
        *before, (word, place) = self._key()
        for outer, outer_place in before:
            table = self._opened((*table, outer), outer_place)
        path = (*table, word)
        self.words[path] = place
        self._at += 1  # the equals sign
        self._skip_space()
        self._value(path)

    def _key(self) -> list[tuple[str, Place]]:
        """The words of a dotted key; the scanner then stands at what follows."""
        words = []
        while True:
            self._skip_space()
            match = _KEY.match(self._text, self._at)
            assert match is not None
            words.append((_unquoted(match[0]), self._here()))
            self._at = match.end()
            self._skip_space()
            if self._text[self._at] != ".":
                return words
            self._at += 1

    def _value(self, path: Path) -> None:
        self.values[path] = self._here()
        opening = self._text[self._at]
        if opening not in "[{":
            match = _SCALAR.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            return
        self._at += 1
        count = 0
        while self._text[self._skip_space()] not in "]}":
            if self._text[self._at] == ",":
                self._at += 1
            elif opening == "[":
                self._value((*path, count))
                count += 1
            else:
                self._pair(path)
        self._at += 1

    def _skip_space(self) -> int:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._at

    def _here(self) -> Place:
        line = bisect_right(self._lines, self._at)
        return Place(line, self._at - self._lines[line - 1] + 1)


def _unquoted(word: str) -> str:
    if word[0] not in "\"'":
        return word
    value: Any = tomllib.loads(f"word = {word}")["word"]
    return str(value)
