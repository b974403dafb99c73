"""YAML with the places of its words and values.

Scalars are those of YAML 1.2 and JSON: ``true``, ``false`` and numbers; any other scalar is text. YAML 1.1 also reads
``no`` as false and ``1:30`` as 90. Anchors, aliases, tags and words that aren't text are refused, and so is a word that
a table has twice.
"""

from __future__ import annotations

import re
from typing import Any, Final

from forebay.errors import short_repr
from forebay.extras import Needs
from forebay.rules.places import Document, InvalidSyntax, Path, Place, at

with Needs("rules", __name__):
    import yaml

__all__ = ["read_yaml"]

_CONSTANTS: Final[dict[str, Any]] = {"true": True, "false": False}
# Far more than a rule file has. A parser's time grows with the square of it.
_MOST_DEPTH: Final = 32
_EMPTY: Final = ("", "null", "~")
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,1000}", re.ASCII)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NUMBER: Final = re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", re.ASCII)


def read_yaml(text: str) -> Document:
    """Raises ``InvalidSyntax``."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise RecursionError
            if getattr(event, "anchor", None) is not None:
                raise InvalidSyntax(
                    _place(event.start_mark), "rule files have no anchors and aliases: repeat the value"
                )
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InvalidSyntax(_place(mark) if mark else Place(1, 1), error.problem or "it can't be read") from None
    except yaml.reader.ReaderError as error:
        raise InvalidSyntax(
            at(text, error.position), f"the character {chr(error.character)!r} isn't allowed in YAML"
        ) from None
    if node is None:
        return Document({})
    words: dict[Path, Place] = {}
    values: dict[Path, Place] = {}
    return Document(_data(node, (), words, values), words, values)


def _data(node: Any, path: Path, words: dict[Path, Place], values: dict[Path, Place]) -> Any:
    place = values[path] = _place(node.start_mark)
    kind = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}[type(node)]
    if node.tag != f"tag:yaml.org,2002:{kind}":
        raise InvalidSyntax(place, f"rule files have no tags, as {node.tag!r}: leave it out")
    if kind == "seq":
        return [_data(item, (*path, number), words, values) for number, item in enumerate(node.value)]
    if kind == "str":
        return _scalar(node, place)
    found: dict[str, Any] = {}
    for word_node, value_node in node.value:
        word_place = _place(word_node.start_mark)
        if not isinstance(word_node, yaml.ScalarNode) or word_node.tag != "tag:yaml.org,2002:str":
            raise InvalidSyntax(word_place, "a word before a colon is text")
        word = _text(word_node, word_place)
        if word in found:
            first = words[(*path, word)]
            raise InvalidSyntax(word_place, f"{word!r} is here twice, first in line {first.line}: leave one out")
        words[(*path, word)] = word_place
        found[word] = _data(value_node, (*path, word), words, values)
    return found


def _text(node: Any, place: Place) -> str:
    text: str = node.value
    if _SURROGATE.search(text):
        raise InvalidSyntax(place, f"{short_repr(text)} has an escape of half a character: write the whole one")
    return text


def _scalar(node: Any, place: Place) -> Any:
    text = _text(node, place)
    if node.style is not None:
        return text
    if text in _EMPTY:
        raise InvalidSyntax(place, "there is no value: write one, or leave the word out")
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)
