"""How are parameters read and answers written? By botocore's own model of EC2; moto's parser reads, ours writes."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.utils import parse_timestamp
from moto.core.model import OperationModel, ServiceModel
from moto.core.parse import EC2QueryParser
from moto.core.utils import get_service_model

from gpucost.rehearsal.api.serializer import ILLEGAL, AnswerWriter, error_body

STATUS = {
    "AuthFailure": 401,
    "BandwidthLimitExceeded": 503,
    "DryRunOperation": 412,
    "EC2ThrottledException": 503,
    "InsufficientAddressCapacity": 500,
    "InsufficientCapacity": 500,
    "InsufficientHostCapacity": 500,
    "InsufficientInstanceCapacity": 500,
    "InsufficientReservedInstanceCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "RequestLimitExceeded": 503,
    "ServerInternal": 500,
    "ServiceUnavailable": 503,
    "UnauthorizedOperation": 403,
    "Unavailable": 503,
}
"""HTTP status of error codes, 400 for all others; SDKs try again by the status.

Which codes are the server's fault: https://docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html, "Server
error codes"; the page says 500-series and no more. RequestLimitExceeded, EC2ThrottledException: what botocore's own
data/_retry.json expects. Others as reports on GitHub quote them: InsufficientInstanceCapacity
(galaxyproject/cloudman#64), UnauthorizedOperation (hashicorp/terraform-provider-aws#4664), AuthFailure
(FoxxMD/laravel-elasticbeanstalk-cron#15), DryRunOperation (getmoto/moto#4270). What nobody quotes is 503 where the
page speaks of load, and 500 where it does not.
"""


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


def parse(action: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a query request, in the API's own names and types.

    Raises:
        Ec2Error: InvalidParameterValue when a number or a time is none; InvalidCharacter for a character that could
            not be shown again.
    """
    for name, value in form.items():
        if ILLEGAL.search(value):
            raise Ec2Error("InvalidCharacter", f"The value of {name} holds a character that is not valid: {value!r}")
    parser = EC2QueryParser(_operation(action), timestamp_parser=_aware)
    try:
        parsed: dict[str, Any] = parser.parse({"values": form})  # type: ignore[typeddict-item]  # all that a query parser reads
    except ValueError as error:
        raise Ec2Error("InvalidParameterValue", f"{action}: {error}") from error
    return parsed


def answer(action: str, result: Mapping[str, Any] | Exception) -> tuple[int, dict[str, str], str]:
    """Status, headers and body for a result, or for an error with `code` and `message`.

    Raises:
        AnswerError: the result is not what EC2's model says of this action.
    """
    request_id = str(uuid.uuid4())
    headers = {"Content-Type": "text/xml;charset=UTF-8", "x-amzn-RequestId": request_id}
    if isinstance(result, Exception):
        code = str(getattr(result, "code", type(result).__name__))
        message = str(getattr(result, "message", result))
        return STATUS.get(code, 400), headers, error_body(code, message, request_id)
    return 200, headers, _writer(action).body(result, request_id)
