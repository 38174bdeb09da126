"""How are parameters read and answers written? By botocore's own model of EC2, through moto's parser and serializer."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.utils import parse_timestamp
from moto.core.model import OperationModel, ServiceModel
from moto.core.parse import EC2QueryParser
from moto.core.serialize import EC2Serializer, SerializationContext
from moto.core.utils import get_service_model


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


def _aware(text: str) -> datetime:
    moment: datetime = parse_timestamp(text)
    return moment.astimezone(UTC)


def parse(action: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a query request, in the API's own names and types.

    Raises:
        Ec2Error: InvalidParameterValue when a number or a time is none.
    """
    parser = EC2QueryParser(_operation(action), timestamp_parser=_aware)
    try:
        parsed: dict[str, Any] = parser.parse({"values": form})  # type: ignore[typeddict-item]  # all that a query parser reads
    except ValueError as error:
        raise Ec2Error("InvalidParameterValue", f"{action}: {error}") from error
    return parsed


def answer(action: str, result: Mapping[str, Any] | Exception) -> tuple[int, dict[str, str], str]:
    """Status, headers and body for a result, or for an error with `code` and `message`."""
    request_id = str(uuid.uuid4())
    serializer = EC2Serializer(_operation(action), context=SerializationContext(request_id=request_id))
    response = serializer.serialize(result)
    body = response["body"]
    headers = {**response["headers"], "Content-Type": "text/xml;charset=UTF-8", "x-amzn-RequestId": request_id}
    return response["status_code"], headers, body if isinstance(body, str) else body.decode()
