"""From the bytes of a rule file to its structs, or to all problems of its words and values."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Final

from forebay.errors import short_repr
from forebay.extras import Needs
from forebay.rules.model import ClientPart, FileRule, Limit, RuleFile, Shedder
from forebay.rules.places import Document, InvalidSyntax, Path, Place, at, path_text
from forebay.rules.problems import Problems, allowed, did_you_mean, near_match
from forebay.rules.toml import read_toml
from forebay.rules.yaml import read_yaml

with Needs("rules", __name__):
    import msgspec
    from msgspec import UNSET, inspect

__all__ = ["BROKEN", "MOST_BYTES", "read_document", "read_rule_file"]

MOST_BYTES: Final = 2**20
"""YAML takes a second for so many."""

BROKEN: Final = FileRule(name="", limits=[])

_READERS: Final = {".toml": read_toml, ".yaml": read_yaml, ".yml": read_yaml}


def read_document(file: str, data: bytes, problems: Problems) -> Document:
    """The data of a file, by the end of its name. Raises ``InvalidRuleFile``."""
    document = Document({})
    start = Place(1, 1)
    reader = next((reader for end, reader in _READERS.items() if file.lower().endswith(end)), None)
    if reader is None:
        problems.add(start, f"the name of a rule file ends with one of {', '.join(_READERS)}")
    elif len(data) > MOST_BYTES:
        problems.add(start, f"a rule file has at most {MOST_BYTES} bytes, and this one has {len(data)}")
    else:
        try:
            document = reader(data.decode())
        except UnicodeDecodeError as error:
            # The bytes before it are text.
            place = at(before := data[: error.start].decode(), len(before))
            problems.add(place, f"the byte 0x{data[error.start]:02x} isn't UTF-8")
        except InvalidSyntax as error:
            problems.add(error.place, error.message)
        except RecursionError:
            problems.add(start, "its lists and tables are nested too deeply")
    problems.raise_if_any()
    return document


def read_rule_file(document: Document, problems: Problems) -> RuleFile:
    """The structs, and in `problems` those of words and values.

    Parts with problems are left out, so that the others can be checked further; `BROKEN` takes the place of a rule.
    """
    _Checker(document, problems).check(document.data, inspect.type_info(RuleFile), ())
    if not problems.count:
        try:
            return msgspec.convert(document.data, RuleFile)
        except msgspec.ValidationError as error:
            # A limit of msgspec's own, such as one of numbers.
            problems.add(Place(1, 1), str(error))
    data = document.data if isinstance(document.data, dict) else {}
    rules = data.get("rules")
    return RuleFile(
        version=1,
        limits=_converted_by_name(data.get("limits"), Limit),
        rules=[_converted(rule, FileRule) or BROKEN for rule in (rules if isinstance(rules, list) else [])],
        client=_converted(data.get("client"), ClientPart) or UNSET,
        tiers=_converted(data.get("tiers"), list[str]) or UNSET,
        shedders=_converted_by_name(data.get("shedders"), Shedder) or UNSET,
    )


def _converted_by_name(table: Any, kind: Any) -> dict[str, Any]:
    """The items without a problem."""
    converted = {name: _converted(item, kind) for name, item in (table if isinstance(table, dict) else {}).items()}
    return {name: item for name, item in converted.items() if name and item is not None}


def _converted(value: Any, kind: Any) -> Any:
    """None if it has a problem."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


class _Checker:
    """Compares data with the types of the structs. msgspec's own check ends with the first problem."""

    def __init__(self, document: Document, problems: Problems) -> None:
        self._document, self._problems = document, problems

    def check(self, value: Any, kind: Any, path: Path, meaning: str = "") -> None:
        """`meaning`: what the value should be, in words."""
        if isinstance(kind, inspect.Metadata):
            self.check(value, kind.type, path, (kind.extra_json_schema or {}).get("description", meaning))
        elif isinstance(kind, inspect.UnionType):
            self._check_union(value, kind, path)
        elif isinstance(kind, inspect.StructType):
            self._check_struct(value, kind, path, meaning)
        elif isinstance(kind, inspect.DictType):
            self._check_dict(value, kind, path, meaning)
        elif isinstance(kind, inspect.ListType):
            self._check_list(value, kind, path, meaning)
        elif not _is_scalar(value, kind):
            near = near_match(value, kind.values) if isinstance(kind, inspect.LiteralType) else ""
            self._refuse(value, path, meaning or _meaning_of(kind), near)

    def _refuse(self, value: Any, path: Path, meaning: str, near: str = "") -> None:
        shown = "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else short_repr(value)
        if isinstance(value, datetime):
            shown = f"{value.isoformat()}{'' if value.tzinfo else ', which has no offset'}"
        self._problems.add(
            self._document.value(path), f"{path_text(path) or 'the file'} is {meaning}, not {shown}{near}"
        )

    def _check_union(self, value: Any, kind: Any, path: Path) -> None:
        if all(isinstance(one, inspect.StructType) for one in kind.types):
            self._check_tagged(value, kind.types, path)
            return
        lists = [one for one in kind.types if isinstance(_bare(one), inspect.ListType)]
        if lists and isinstance(value, list):
            self.check(value, lists[0], path)
            return
        scalars = [one for one in kind.types if one not in lists]
        if not any(_is_scalar(value, _bare(one)) for one in scalars):
            meanings = [_description(one) or _meaning_of(_bare(one)) for one in scalars]
            self._refuse(value, path, " or ".join([*meanings, *(["a list of several"] if lists else [])]))

    def _check_tagged(self, value: Any, kinds: Any, path: Path) -> None:
        """A table whose other words depend on the value of one."""
        field = kinds[0].tag_field
        by_tag = {kind.tag: kind for kind in kinds}
        if not isinstance(value, dict):
            self._refuse(value, path, f"a table with {field}")
        elif field not in value:
            self._problems.add(
                self._document.word(path), f"{path_text(path)} lacks {field}: allowed: {allowed(by_tag)}"
            )
        elif not isinstance(value[field], str) or value[field] not in by_tag:
            path = (*path, field)
            self._problems.add(
                self._document.value(path),
                f"{path_text(path)} is none of the {field}s: {short_repr(value[field])}: "
                f"{did_you_mean(str(value[field]), by_tag)}",
            )
        else:
            self._check_struct({k: v for k, v in value.items() if k != field}, by_tag[value[field]], path)

    def _check_struct(self, value: Any, kind: Any, path: Path, meaning: str = "") -> None:
        if not isinstance(value, dict):
            self._refuse(value, path, meaning or "a table")
            return
        fields = {field.encode_name: field for field in kind.fields}
        where = (path_text(path) or "the file") + (f" ({kind.tag})" if kind.tag else "")
        refused = getattr(kind.cls, "refused", {})
        for word in value:
            if word not in fields:
                remedy = refused[word] if word in refused else did_you_mean(word, fields)
                self._problems.add(
                    self._document.word((*path, word)), f"{short_repr(word)} is no word of {where}: {remedy}"
                )
        for name, field in fields.items():
            if name in value:
                self.check(value[name], field.type, (*path, name))
            elif field.required:
                meaning = _description(field.type) or "a table"
                self._problems.add(self._document.word(path), f"{where} lacks {name}: {meaning}")

    def _check_dict(self, value: Any, kind: Any, path: Path, meaning: str) -> None:
        if not isinstance(value, dict):
            self._refuse(value, path, meaning or "a table")
            return
        self._check_length(value, kind, path, "table")
        for word, item in value.items():
            if not _is_scalar(word, _bare(kind.key_type)):
                self._problems.add(self._document.word((*path, word)), f"{path_text(path)} has an empty name")
            self.check(item, kind.value_type, (*path, word))

    def _check_list(self, value: Any, kind: Any, path: Path, meaning: str) -> None:
        if not isinstance(value, list):
            self._refuse(value, path, meaning or f"a list, each item {_description(kind.item_type) or 'a table'}")
            return
        self._check_length(value, kind, path, "list", meaning)
        for number, item in enumerate(value):
            self.check(item, kind.item_type, (*path, number))

    def _check_length(self, value: Any, kind: Any, path: Path, what: str, meaning: str = "") -> None:
        if value and len(value) < (kind.min_length or 0):
            self._problems.add(
                self._document.value(path), f"{path_text(path)} is {meaning}, not a {what} of {len(value)}"
            )
        elif len(value) < (kind.min_length or 0):
            self._problems.add(
                self._document.value(path), f"{path_text(path)} is an empty {what}: fill it, or leave the word out"
            )


def _bare(kind: Any) -> Any:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _description(kind: Any) -> str:
    if isinstance(kind, inspect.UnionType):
        return " or ".join(filter(None, map(_description, kind.types)))
    return (kind.extra_json_schema or {}).get("description", "") if isinstance(kind, inspect.Metadata) else ""


def _meaning_of(kind: Any) -> str:
    return " or ".join(map(repr, kind.values)) if isinstance(kind, inspect.LiteralType) else "text"


def _is_scalar(value: Any, kind: Any) -> bool:
    """Whether it is a value of that kind, which is no table and no list."""
    if isinstance(kind, inspect.StrType):
        return isinstance(value, str) and len(value) >= (kind.min_length or 0) and _fits(value, kind.pattern)
    if isinstance(kind, inspect.IntType):
        return type(value) is int and (kind.ge or 0) <= value <= (kind.le or value)
    if isinstance(kind, inspect.FloatType):
        if type(value) not in (int, float):
            return False
        is_large = value >= kind.ge if kind.ge is not None else value > (kind.gt or 0)
        return bool(is_large and value <= (kind.le or value))
    if isinstance(kind, inspect.LiteralType):
        return type(value) in (str, int) and value in kind.values
    if isinstance(kind, inspect.DateTimeType):
        return _is_time(value)
    return isinstance(kind, inspect.BoolType) and isinstance(value, bool)


def _fits(value: str, pattern: str | None) -> bool:
    return pattern is None or re.search(pattern, value) is not None


def _is_time(value: Any) -> bool:
    """Whether it is a time with an offset. YAML has it as text."""
    return _converted(value, Annotated[datetime, msgspec.Meta(tz=True)]) is not None
