"""Text and JSON files as data sets ship them, read so that an error names the file and the line or record."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

_CHUNK = 1 << 22  # characters read at a time from an array
_LARGEST_RECORD = 1 << 25  # characters after which a record that does not parse is taken for broken, not for unfinished
_TOO_DEEP = "its JSON is nested too deeply to be data of this kind; the file is damaged, or another one was meant"
_BETWEEN_RECORDS = re.compile(r"[\s,]*")

Field = TypeVar("Field")


def read_text(path: Path) -> str:
    """Returns the file's text, line ends as "\\n" and no byte order mark.

    Raises `ValueError` naming the file where it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


def json_document(path: Path) -> Any:
    """Returns the parsed file; raises `ValueError` naming it where it is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Returns the parsed text; raises `ValueError`, opening with `where`, where it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{where}: {_TOO_DEEP}") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", object) for every line that is not blank.

    Raises `ValueError` naming file and line where a line is not UTF-8, not JSON or not an object.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not line.strip():
                    continue
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON ({error}); expected one JSON object a line") from error
            except RecursionError as error:
                raise ValueError(f"{where}: {_TOO_DEEP}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: got {_kind(row)}, expected one JSON object a line")
            yield where, row


def json_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file: record n", object) for every object of the array that is the file.

    The file is never held whole: a 1.5 GB array costs a few MB. Raises `ValueError` naming the record where the file is
    not an array of objects or ends early.
    """
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = _read(file, path)
        while text.isspace():
            text = _read(file, path)
        at = len(text) - len(text.lstrip())
        if text[at : at + 1] != "[":
            raise ValueError(f"{path}: expected a JSON array of records, got a file that starts {text[at : at + 20]!r}")
        at, number = at + 1, 0
        while True:
            between = _BETWEEN_RECORDS.match(text, at)
            at = between.end() if between else at
            if text[at : at + 1] == "]":
                return
            where = f"{path}: record {number} (counted from 0)"
            try:
                record, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                more = "" if len(text) - at > _LARGEST_RECORD else _read(file, path)
                if not more:
                    reason = f"not valid JSON, or the file was cut ({error.msg})"
                    raise ValueError(f"{where}: {reason}") from error
                text, at = text[at:] + more, 0
                continue
            except RecursionError as error:
                raise ValueError(f"{where}: {_TOO_DEEP}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: got {_kind(record)}, expected an object")
            yield where, record
            number += 1


def objects(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("where[n]", object) for the objects of an array inside a parsed document.

    Raises `ValueError`, opening with `where`, where it is not an array of objects.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where}: got {_kind(value)}, expected a list of objects")
    for number, row in enumerate(value):
        if not isinstance(row, dict):
            raise ValueError(f"{where}[{number}]: got {_kind(row)}, expected an object")
        yield f"{where}[{number}]", row


def json_field(row: Any, key: str, kind: type[Field], where: str) -> Field:
    """Returns `row[key]`; raises `ValueError`, opening with `where`, where it is missing or not of that kind."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: got {_kind(row)}, expected an object with {key!r}")
    if key not in row:
        raise ValueError(f"{where}: the key {key!r} is missing; it has {', '.join(map(repr, row)) or 'no keys'}")
    value = row[key]
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {key!r} is {_kind(value)}, expected {_NAMES.get(kind, kind.__name__)}")
    return value


def counted(number: int, things: str) -> str:
    """The number with what it counts, for messages.

    >>> counted(1, "pictures without captions"), counted(1, "classes"), counted(2000, "classes")
    ('1 picture without caption', '1 class', '2,000 classes')
    """
    return f"{number:,} {_PLURAL.sub('', things) if number == 1 else things}"


_PLURAL = re.compile(r"(?<=ss)es\b|(?<=[^s\W])s\b")
_NAMES: dict[type, str] = {str: "a string", int: "a number", list: "a list", dict: "an object"}


def _kind(value: object) -> str:
    return "null" if value is None else _NAMES.get(type(value), f"a {type(value).__name__}")


def _read(file: Any, path: Path) -> str:
    try:
        return file.read(_CHUNK)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
