"""How are parameters read and answers written? By botocore's own model of EC2; moto's parser reads, ours writes."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.utils import parse_timestamp
from moto.core.exceptions import ServiceException
from moto.core.model import OperationModel, ServiceModel
from moto.core.parse import EC2QueryParser
from moto.core.utils import get_service_model
from werkzeug.wrappers import Response

from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.protocol.answers import EC2_XML, internal_error
from gpucost.rehearsal.protocol.serializer import ILLEGAL, AnswerWriter, error_body

log = logging.getLogger(__name__)


class Ec2Error(Exception):
    """An error in EC2's words; `code` is what clients tell cases apart by."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@functools.cache
def _model() -> ServiceModel:
    return get_service_model("ec2")


@functools.cache
def _operation(action: str) -> OperationModel:
    operation: OperationModel = _model().operation_model(action)
    return operation


@functools.cache
def _writer(action: str) -> AnswerWriter:
    return AnswerWriter(_operation(action), _model().metadata["xmlNamespace"])


def _aware(text: str) -> datetime:
    moment: datetime = parse_timestamp(text)
    return moment.astimezone(UTC)


def check_action(action: str) -> None:
    """Refuse what is no action of EC2's; raises Ec2Error: InvalidAction."""
    if action not in _model().operation_names:
        raise Ec2Error("InvalidAction", f"The action {action} is not valid for this web service.")


@functools.cache
def values_of(shape: str) -> frozenset[str]:
    """The values that an enumeration of EC2's model has, such as ResourceType."""
    return frozenset(_model().shape_for(shape).enum)


def check_characters(form: Mapping[str, str]) -> None:
    """Refuse what no answer could show again, whoever keeps it; raises Ec2Error: InvalidCharacter."""
    for name, value in form.items():
        if ILLEGAL.search(value):
            raise Ec2Error("InvalidCharacter", f"The value of {name} holds a character that is not valid: {value!r}")


def parse(action: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a query request, in the API's own names and types.

    Raises:
        Ec2Error: InvalidParameterValue when a number or a time is none; InvalidCharacter for a character that could
            not be shown again.
    """
    check_characters(form)
    parser = EC2QueryParser(_operation(action), timestamp_parser=_aware)
    try:
        parsed: dict[str, Any] = parser.parse({"values": form})  # type: ignore[typeddict-item]  # all that a query parser reads
    except (ValueError, OverflowError, RuntimeError) as error:
        # a time outside of the calendar is an OverflowError, and a RuntimeError where botocore gives up
        raise Ec2Error("InvalidParameterValue", f"{action}: {error}") from error
    return parsed


def answer(action: str, result: Mapping[str, Any] | Exception) -> tuple[int, dict[str, str], str]:
    """Status, headers and body for a result, or for an error with `code` and `message`.

    Raises:
        AnswerError: the result is not what EC2's model says of this action.
    """
    request_id = str(uuid.uuid4())
    headers = {"Content-Type": EC2_XML, "x-amzn-RequestId": request_id}
    if isinstance(result, Exception):
        code = str(getattr(result, "code", type(result).__name__))
        message = str(getattr(result, "message", result))
        return catalogue.failure(code).status, headers, error_body(code, message, request_id)
    return 200, headers, _writer(action).body(result, request_id)


def respond(action: str, make: Callable[[], Mapping[str, Any]]) -> Response:
    """The response to a request: what `make` returns, or the error that it raises, always in EC2's form.

    Args:
        action: EC2's name of it.
        make: does the work; its result is in the model's own names.
    """
    try:
        status, headers, body = answer(action, make())
    except (Ec2Error, ServiceException) as error:
        return refuse(action, error)
    except Exception:
        # also an answer that is not what the model says: see `internal_error`
        log.exception("%s failed", action)
        return internal_error("ec2", as_json=False)
    return Response(body, status=status, headers=headers)


def refuse(action: str, error: Ec2Error | ServiceException) -> Response:
    """The response with an error."""
    log.info("%s refused: %s", action, error)
    status, headers, body = answer(action, error)
    return Response(body, status=status, headers=headers)


@functools.cache
def parameters(action: str) -> frozenset[str]:
    """The names of an action's parameters; none for what is no action of EC2's."""
    if action not in _model().operation_names:
        return frozenset()
    shape = _operation(action).input_shape
    return frozenset(shape.members if shape is not None else ())
