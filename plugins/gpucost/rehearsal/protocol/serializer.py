"""How does an answer become EC2's XML? By writers that are made once from botocore's own model of each answer.

The design asks for moto's serializers instead of XML written by hand. Here no element is named by hand either:
every name and type comes from the model. moto's walk of that model, however, takes 170 ms for 200 instances, and
these writers about 5 ms (docs/decisions/0006-ec2-serializer.md).

Rules: https://smithy.io/2.0/aws/protocols/aws-ec2-query-protocol.html. EC2's answers use structures, lists and
scalars only; every list is wrapped, its members are named `item`.
"""

from __future__ import annotations

import base64
import functools
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.model import ListShape, OperationModel, Shape, StructureShape

Write = Callable[[Any, list[str]], None]
"""Appends a value's XML to a list of texts."""

DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'

# XML 1.0, section 2.2: there is no way to write these
_ILLEGAL = "\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff"
ILLEGAL = re.compile(f"[{_ILLEGAL}]")
"""Characters that no answer can hold."""

_SPECIAL = re.compile(f"[&<>\r{_ILLEGAL}]")
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"}


class Unchanging(dict[str, Any]):
    """A structure that nobody changes any more: its XML is written once, and used again in later answers.

    `written` holds it by the writer that wrote it, since other places give other tags.
    """

    __slots__ = ("written",)

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__(members)
        self.written: dict[Write, str] = {}


class AnswerError(ValueError):
    """An answer is not what EC2's model says it is: a fault of the rehearsal's, not of the caller's."""


def escape(text: str) -> str:
    """Text as XML holds it.

    Raises:
        AnswerError: a character that XML 1.0 cannot hold.
    """
    return text if _SPECIAL.search(text) is None else _SPECIAL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    if character not in _ESCAPED:
        raise AnswerError(f"got {character!r} in a text, expected only characters that XML 1.0 can hold")
    return _ESCAPED[character]


def error_body(code: str, message: str, request_id: str) -> str:
    """EC2's error answer; a message may quote what it refuses, so characters that XML cannot hold become `?`."""
    message = ILLEGAL.sub("?", message)
    return (
        f"{DECLARATION}<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
        f"</Errors><RequestID>{request_id}</RequestID></Response>"
    )


class AnswerWriter:
    """Writes the answers of one operation.

    Args:
        operation: botocore's model of it.
        namespace: the XML namespace of the service.
    """

    def __init__(self, operation: OperationModel, namespace: str) -> None:
        name = operation.name
        self._head = f'{DECLARATION}<{name}Response xmlns="{escape(namespace)}"><requestId>'
        self._foot = f"</{name}Response>"
        self._members: dict[str, Write] | None = None
        self._name = f"{name}Result"
        if operation.output_shape is not None:
            self._name = operation.output_shape.name
            self._members = _member_writers(operation.output_shape, {})

    def body(self, result: Mapping[str, Any], request_id: str) -> str:
        """The XML document of a result in the model's own names; members that are None are left out.

        Raises:
            AnswerError: a member that the model does not have, or a value of another type; says where.
        """
        out = [self._head, request_id, "</requestId>"]
        if self._members is not None:
            _write_members(self._name, self._members, result, out)
        elif result:
            raise AnswerError(f"{self._name}: got {sorted(result)}, expected nothing: the model has no output")
        else:
            # actions without output say this; it is in every example of the API reference, but not in the model
            out.append("<return>true</return>")
        out.append(self._foot)
        return "".join(out)


def _write_members(name: str, writers: Mapping[str, Write], value: Any, out: list[str]) -> None:
    # dict first: asking the abstract class takes as long as writing a member
    if not isinstance(value, dict) and not isinstance(value, Mapping):
        raise AnswerError(f"{name}: got {value!r:.80}, expected a mapping")
    key = ""
    try:
        for key, member in value.items():
            if member is not None:
                writers[key](member, out)
    except AnswerError as error:
        raise AnswerError(f"{name}.{key}: {error}") from error
    except KeyError as error:
        raise AnswerError(f"{name}.{key}: unknown to EC2's model, which has {', '.join(sorted(writers))}") from error


def _member_writers(shape: StructureShape, made: dict[str, dict[str, Write]]) -> dict[str, Write]:
    """One writer for each member; `made` shares those of shapes that an answer holds in several places."""
    if shape.name not in made:
        writers = made[shape.name] = {}
        for key, member in shape.members.items():
            writers[key] = _writer(member, member.serialization.get("name", key), made)
    return made[shape.name]


def _writer(shape: Shape, tag: str, made: dict[str, dict[str, Write]]) -> Write:
    if shape.type_name == "structure":
        return _structure_writer(shape, tag, made)
    if shape.type_name == "list":
        return _list_writer(shape, tag, made)
    if shape.type_name in _SCALARS:
        return _scalar_writer(_SCALARS[shape.type_name], tag)
    raise AnswerError(f"{shape.name}: EC2's model has a {shape.type_name} now; write down here how it is written")


def _structure_writer(shape: StructureShape, tag: str, made: dict[str, dict[str, Write]]) -> Write:
    name, writers = shape.name, _member_writers(shape, made)
    first, last = f"<{tag}>", f"</{tag}>"

    def write(value: Any, out: list[str]) -> None:
        out.append(first)
        _write_members(name, writers, value, out)
        out.append(last)

    def write_or_reuse(value: Any, out: list[str]) -> None:
        if type(value) is not Unchanging:
            write(value, out)
            return
        text = value.written.get(write)
        if text is None:
            own: list[str] = []
            write(value, own)
            text = value.written[write] = "".join(own)
        out.append(text)

    return write_or_reuse


def _list_writer(shape: ListShape, tag: str, made: dict[str, dict[str, Write]]) -> Write:
    if shape.serialization.get("flattened"):
        raise AnswerError(f"{shape.name}: EC2's model has a flattened list now; write down here how it is written")
    member = _writer(shape.member, shape.member.serialization.get("name", "member"), made)
    first, last = f"<{tag}>", f"</{tag}>"

    def write(value: Any, out: list[str]) -> None:
        if not isinstance(value, list | tuple):
            raise AnswerError(f"got {value!r:.80}, expected a list")
        out.append(first)
        for item in value:
            member(item, out)
        out.append(last)

    return write


def _scalar_writer(text_of: Callable[[Any], str], tag: str) -> Write:
    first, last = f"<{tag}>", f"</{tag}>"

    def write(value: Any, out: list[str]) -> None:
        out.append(f"{first}{text_of(value)}{last}")

    return write


def _boolean(value: Any) -> str:
    if not isinstance(value, bool):
        raise AnswerError(f"got {value!r:.80}, expected True or False")
    return "true" if value else "false"


def _integer(value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        raise AnswerError(f"got {value!r:.80}, expected an integer")
    return str(value)


def _double(value: Any) -> str:
    if not isinstance(value, int | float | Decimal) or isinstance(value, bool) or not math.isfinite(value):
        raise AnswerError(f"got {value!r:.80}, expected a finite number")
    return repr(float(value))


@functools.lru_cache(maxsize=4096)
def _moment(value: datetime) -> str:
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _timestamp(value: Any) -> str:
    """`2026-11-30T16:43:14.000Z`, as EC2 shows times, in milliseconds, rounded down."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise AnswerError(f"got {value!r:.80}, expected a time with its zone")
    return _moment(value)


def _blob(value: Any) -> str:
    if not isinstance(value, bytes):
        raise AnswerError(f"got {value!r:.80}, expected bytes")
    return base64.b64encode(value).decode("ascii")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise AnswerError(f"got {value!r:.80}, expected a string")
    return escape(value)


_SCALARS: dict[str, Callable[[Any], str]] = {
    "string": _string,
    "boolean": _boolean,
    "integer": _integer,
    "long": _integer,
    "float": _double,
    "double": _double,
    "timestamp": _timestamp,
    "blob": _blob,
}
