"""What EC2 answers when it will not serve, each treated as it needs."""

from __future__ import annotations

from typing import Any

import botocore.exceptions as boto
import pytest
from botocore.parsers import ResponseParserError

from gpucost.capacity.providers.base import ProviderError
from gpucost.capacity.providers.ec2_errors import call_ec2
from gpucost.reasons import Reason, Then, rule_for


def asked(error: Exception) -> ProviderError:
    """What becomes of an error of boto3."""

    def call() -> None:
        raise error

    with pytest.raises(ProviderError) as told:
        call_ec2(call)
    return told.value


def answer(code: str, status: int = 400, message: str = "EC2's words") -> boto.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return boto.ClientError(response, "CreateFleet")


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("InsufficientInstanceCapacity", 500, Reason.NO_CAPACITY),
        ("UnfulfillableCapacity", 400, Reason.NO_CAPACITY),
        ("SpotMaxPriceTooLow", 400, Reason.PRICE_TOO_LOW),
        ("MaxSpotInstanceCountExceeded", 400, Reason.QUOTA),
        ("VcpuLimitExceeded", 400, Reason.QUOTA),
        ("RequestLimitExceeded", 503, Reason.THROTTLED),
        ("Throttling", 400, Reason.THROTTLED),
        ("InternalError", 500, Reason.CLOUD_ERROR),
        ("ServiceUnavailable", 503, Reason.CLOUD_ERROR),
        ("502", 502, Reason.CLOUD_ERROR),
        ("Unknown", 504, Reason.CLOUD_ERROR),
        ("UnauthorizedOperation", 403, Reason.NOT_AUTHORIZED),
        ("AuthFailure", 401, Reason.NOT_AUTHORIZED),
        ("ExpiredToken", 400, Reason.NOT_AUTHORIZED),
        ("InvalidAMIID.NotFound", 400, Reason.BAD_REQUEST),
    ],
)
def test_each_code_has_its_reason_and_keeps_ec2_s_words(code: str, status: int, reason: Reason) -> None:
    error = asked(answer(code, status))
    assert (error.reason, error.code) == (reason, code)
    assert code in str(error)
    assert "EC2's words" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        boto.ConnectTimeoutError(endpoint_url="https://ec2"),
        boto.ReadTimeoutError(endpoint_url="https://ec2"),
        boto.EndpointConnectionError(endpoint_url="https://ec2"),
        boto.ConnectionClosedError(endpoint_url="https://ec2"),
        boto.HTTPClientError(error="reset"),
        ResponseParserError("<html>"),
    ],
)
def test_no_answer_is_not_a_no_the_order_may_have_been_carried_out(error: Exception) -> None:
    told = asked(error)
    assert told.reason is Reason.CLOUD_ERROR
    assert "EC2 did not answer" in str(told)


@pytest.mark.parametrize(
    "error",
    [
        boto.NoCredentialsError(),
        boto.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
        boto.CredentialRetrievalError(provider="role", error_msg="403"),
    ],
)
def test_without_credentials_asking_again_does_not_help(error: Exception) -> None:
    told = asked(error)
    assert told.reason is Reason.NOT_AUTHORIZED
    assert rule_for(told.reason).then is Then.FAIL


def test_a_request_that_was_never_sent_is_a_bad_request() -> None:
    assert asked(boto.ParamValidationError(report="Missing ImageId")).reason is Reason.BAD_REQUEST


def test_an_answer_is_passed_on() -> None:
    assert call_ec2(lambda: 7) == 7


def test_a_mistake_of_ours_is_not_the_cloud_s() -> None:
    with pytest.raises(KeyError):
        call_ec2(lambda: {}["x"])
