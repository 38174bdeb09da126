"""What EC2 answers when it will not serve, and what each answer means here.

Codes from https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpucost.capacity.providers.base import ProviderError
from gpucost.reasons import Reason

CODES: dict[str, Reason] = {
    "InsufficientInstanceCapacity": Reason.NO_CAPACITY,
    "InsufficientCapacity": Reason.NO_CAPACITY,
    "UnfulfillableCapacity": Reason.NO_CAPACITY,
    "Unsupported": Reason.NO_CAPACITY,
    "InsufficientFreeAddressesInSubnet": Reason.NO_CAPACITY,
    "SpotMaxPriceTooLow": Reason.PRICE_TOO_LOW,
    "MaxSpotInstanceCountExceeded": Reason.QUOTA,
    "VcpuLimitExceeded": Reason.QUOTA,
    "InstanceLimitExceeded": Reason.QUOTA,
    "RequestLimitExceeded": Reason.THROTTLED,
    "Throttling": Reason.THROTTLED,
    "ThrottlingException": Reason.THROTTLED,
    "InternalError": Reason.CLOUD_ERROR,
    "InternalFailure": Reason.CLOUD_ERROR,
    "ServiceUnavailable": Reason.CLOUD_ERROR,
    "Unavailable": Reason.CLOUD_ERROR,
    "UnauthorizedOperation": Reason.NOT_AUTHORIZED,
    "AuthFailure": Reason.NOT_AUTHORIZED,
    "ExpiredToken": Reason.NOT_AUTHORIZED,
    "RequestExpired": Reason.NOT_AUTHORIZED,
    "InvalidClientTokenId": Reason.NOT_AUTHORIZED,
}


def reason_for(code: str) -> Reason:
    """What EC2's error `code` means; an unknown one is a mistake in what was asked."""
    return CODES.get(code, Reason.BAD_REQUEST)


def provider_error(code: str, message: str) -> ProviderError:
    """EC2's answer as our error."""
    return ProviderError(reason_for(code), f"{code}: {message}", code)


T = TypeVar("T")


def call_ec2(call: Callable[[], T]) -> T:
    """The answer of a boto3 call, its errors told as ours.

    Raises:
        ProviderError: the call was refused, or nobody answered (then it is unknown whether it was carried out).
    """
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
    )
    from botocore.parsers import ResponseParserError

    try:
        return call()
    except ClientError as refused:
        error = refused.response.get("Error", {})
        code, message = error.get("Code", "Unknown"), error.get("Message", str(refused))
        status = refused.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status >= 500 and code not in CODES:
            # A gateway's answer, or a code that is not in the list: whether it was carried out is not known.
            raise ProviderError(Reason.CLOUD_ERROR, f"{code} (HTTP {status}): {message}", code) from refused
        raise provider_error(code, message) from refused
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as nobody:
        raise ProviderError(Reason.NOT_AUTHORIZED, f"EC2 was not asked: {nobody}", type(nobody).__name__) from nobody
    except ParamValidationError as wrong:
        raise ProviderError(Reason.BAD_REQUEST, f"EC2 was not asked: {wrong}", type(wrong).__name__) from wrong
    except (BotoCoreError, ResponseParserError) as away:
        raise ProviderError(Reason.CLOUD_ERROR, f"EC2 did not answer: {away}", type(away).__name__) from away
