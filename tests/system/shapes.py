"""Are answers what EC2's model says they are? Hooks a boto3 client, so that every answer it gets is checked.

boto3 checks requests by itself, but takes answers as they come: it drops what it does not know and trusts the rest.

    shapes = check_shapes(client)
    ...                              # WrongAnswer is raised out of the call whose answer is wrong
    assert shapes.checked["DescribeInstances"] > 0
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import botocore.parsers
from botocore.model import OperationModel, Shape
from botocore.validate import ParamValidator

NAMESPACE = re.compile(r"\{http://ec2\.amazonaws\.com/doc/\d{4}-\d\d-\d\d/?\}")
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
METADATA = {"requestId"}
UNLISTED = {
    ("PlatformValues", "windows"),
    ("PlatformValues", "Linux/UNIX"),
    ("SupportedAdditionalProcessorFeature", "metal-compatibility"),
}
"""What moto answers beside the values that EC2's model lists: its copies of EC2's data have them."""

ERRORS_OF_MOTO = frozenset({"CreateSubnet"})
"""Actions whose errors are not checked: moto writes them with a namespace that EC2's have not; SDKs read both."""


class WrongAnswer(AssertionError):
    """An answer that EC2 would not give; lists everything that is wrong with it."""


@dataclass
class Shapes:
    """What was checked: the number of answers, errors too, by action."""

    checked: Counter[str] = field(default_factory=Counter)

    def check(self, response_dict: dict[str, Any], operation_model: OperationModel, **_: Any) -> None:
        """Handler of botocore's `before-parse`, which comes with every answer, also with those tried again.

        Raises:
            WrongAnswer: says where the answer differs from the model.
        """
        faults = answer_faults(operation_model, response_dict)
        if faults:
            text = response_dict["body"].decode(errors="replace")
            lines = "\n  ".join(faults)
            raise WrongAnswer(f"{operation_model.name}: not as EC2's model says:\n  {lines}\n{text:.2000}")
        self.checked[operation_model.name] += 1


def check_shapes(client: Any) -> Shapes:
    """Check every answer that `client`, of boto3's EC2, gets from now on."""
    shapes = Shapes()
    client.meta.events.register("before-parse.ec2", shapes.check)
    return shapes


def answer_faults(operation: OperationModel, response: dict[str, Any]) -> list[str]:
    """What is wrong with an answer of EC2's: `status_code`, `headers` and `body`, as botocore has them."""
    try:
        root = ElementTree.fromstring(response["body"])  # noqa: S314 (the answer of our own server)
    except ElementTree.ParseError as error:
        return [f"no XML: {error}"]
    if response["status_code"] >= 300:
        if operation.name in ERRORS_OF_MOTO:
            return []
        return _error_faults(root, response["status_code"])
    faults: list[str] = []
    if NAMESPACE.sub("", root.tag) != f"{operation.name}Response" or not NAMESPACE.match(root.tag):
        faults.append(f"root: got {root.tag}, expected {operation.name}Response in EC2's namespace")
    if not root.findtext("{*}requestId"):
        faults.append("requestId: missing")
    shape = operation.output_shape
    if shape is None:
        told = [(_tag(child), child.text) for child in root if _tag(child) not in METADATA]
        return (
            faults if told in ([], [("return", "true")]) else [*faults, f"got {told}, expected <return>true</return>"]
        )
    _structure_faults(shape, root, shape.name, faults, METADATA)
    return faults or _parsed_faults(response, shape)


def _parsed_faults(response: dict[str, Any], shape: Shape) -> list[str]:
    """What botocore's own validator says of what its own parser reads."""
    parsed = botocore.parsers.create_parser("ec2").parse(response, shape)
    parsed.pop("ResponseMetadata")
    report = ParamValidator().validate(parsed, shape)
    return [report.generate_report()] if report.has_errors() else []


def _error_faults(root: ElementTree.Element, status: int) -> list[str]:
    if status < 400:
        return [f"status: got {status}, expected 200 or an error"]
    parts = {path: root.findtext(path) for path in ("Errors/Error/Code", "Errors/Error/Message", "RequestID")}
    faults = [f"{path}: missing in an error" for path, text in parts.items() if not text]
    return faults if root.tag == "Response" else [f"root: got {root.tag}, expected Response", *faults]


def _tag(element: ElementTree.Element) -> str:
    return NAMESPACE.sub("", element.tag)


def _faults(shape: Shape, element: ElementTree.Element, where: str, faults: list[str]) -> None:
    if shape.type_name == "structure":
        _structure_faults(shape, element, where, faults)
    elif shape.type_name == "list":
        wanted = shape.member.serialization.get("name", "member")
        _text_faults(element, where, faults)
        for index, child in enumerate(element):
            if _tag(child) != wanted:
                faults.append(f"{where}: <{_tag(child)}> in a list, expected <{wanted}>")
            else:
                _faults(shape.member, child, f"{where}[{index}]", faults)
    elif len(element):
        faults.append(f"{where}: got elements in it, expected {shape.type_name}")
    else:
        _scalar_faults(shape, element.text or "", where, faults)


def _structure_faults(
    shape: Shape, element: ElementTree.Element, where: str, faults: list[str], known: Collection[str] = ()
) -> None:
    _text_faults(element, where, faults)
    members = {member.serialization.get("name", name): (name, member) for name, member in shape.members.items()}
    for tag, times in Counter(map(_tag, element)).items():
        if tag not in members and tag not in known:
            faults.append(f"{where}: <{tag}> is not in the model, which has {', '.join(sorted(members))}")
        elif times > 1:
            faults.append(f"{where}: <{tag}> comes {times} times")
    for child in element:
        if _tag(child) in members:
            name, member = members[_tag(child)]
            _faults(member, child, f"{where}.{name}", faults)


def _text_faults(element: ElementTree.Element, where: str, faults: list[str]) -> None:
    texts = [element.text, *(child.tail for child in element)]
    faults += [f"{where}: stray text {text!r:.60}" for text in texts if text and text.strip()]


def _scalar_faults(shape: Shape, text: str, where: str, faults: list[str]) -> None:
    allowed = getattr(shape, "enum", None)
    of_another_cloud = shape.name == "InstanceType" and "." not in text
    if allowed and text not in allowed and (shape.name, text) not in UNLISTED and not of_another_cloud:
        faults.append(f"{where}: got {text!r}, expected one of {', '.join(allowed[:20])}")
    elif not SCALARS[shape.type_name](text):
        faults.append(f"{where}: got {text!r:.60}, expected {shape.type_name}")


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error:
        return False
    return True


SCALARS: dict[str, Callable[[str], object]] = {
    "string": lambda _text: True,
    "boolean": lambda text: text in {"true", "false"},
    "integer": lambda text: re.fullmatch(r"-?\d+", text),
    "long": lambda text: re.fullmatch(r"-?\d+", text),
    "float": NUMBER.fullmatch,
    "double": NUMBER.fullmatch,
    "timestamp": MOMENT.fullmatch,
    "blob": _is_base64,
}
