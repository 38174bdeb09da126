"""Which errors does AWS answer, with which HTTP status and words?

Codes and meanings:
    EC2: https://docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html
    every service: the page CommonErrors of its API reference, for example
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/CommonErrors.html
    STS: https://docs.aws.amazon.com/STS/latest/APIReference/CommonErrors.html
EC2's page says of server errors that they are of the 500 series, and no more; it gives no full messages. SDKs try
again by the status, so it matters. RequestLimitExceeded and EC2ThrottledException: 503, what botocore's own
data/_retry.json expects. Others as reports on GitHub quote them: InsufficientInstanceCapacity
(galaxyproject/cloudman#64), UnauthorizedOperation (hashicorp/terraform-provider-aws#4664), AuthFailure
(FoxxMD/laravel-elasticbeanstalk-cron#15), DryRunOperation (getmoto/moto#4270). What nobody quotes is 503 where the
page speaks of load, and 500 where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY = frozenset({"ec2", "sts", "sqs", "events"})
_EC2 = frozenset({"ec2"})
_QUERY = frozenset({"sts", "sqs"})
_JSON = frozenset({"events", "sqs"})


@dataclass(frozen=True)
class Known:
    """One error that AWS answers.

    Args:
        code: what clients tell cases apart by.
        status: the HTTP status.
        message: AWS's words, or words like AWS's.
        services: who answers it.
    """

    code: str
    status: int
    message: str
    services: frozenset[str]


@dataclass(frozen=True)
class Failure:
    """An error to answer: its code, its message, its HTTP status."""

    code: str
    message: str
    status: int


_KNOWN = (
    # nothing to be had: another pool, later
    Known("InsufficientInstanceCapacity", 500, "There is no Spot capacity available that matches your request.", _EC2),
    Known("InsufficientCapacity", 500, "There is not enough capacity to fulfill your request.", _EC2),
    Known("InsufficientAddressCapacity", 500, "There are not enough available addresses.", _EC2),
    Known("InsufficientHostCapacity", 500, "There is not enough capacity for the host.", _EC2),
    Known("InsufficientReservedInstanceCapacity", 500, "There are not enough available Reserved Instances.", _EC2),
    Known("UnfulfillableCapacity", 500, "Unable to fulfill capacity due to your request configuration.", _EC2),
    Known("SpotMaxPriceTooLow", 400, "Your Spot request price is lower than the minimum required Spot request "
          "fulfillment price.", _EC2),
    # a quota: for good, until it is raised
    Known("MaxSpotInstanceCountExceeded", 400, "Max spot instance count exceeded", _EC2),
    Known("VcpuLimitExceeded", 400, "You have requested more vCPU capacity than your current vCPU limit allows for "
          "the instance bucket that the specified instance type belongs to. Please visit "
          "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.", _EC2),
    Known("InstanceLimitExceeded", 400, "You have requested more instances than your current instance limit allows.",
          _EC2),
    Known("MaxFleetCountExceeded", 400, "You've reached your quota for maximum Fleet Requests for this account.", _EC2),
    # too fast: back off
    Known("RequestLimitExceeded", 503, "Request limit exceeded.", _EC2),
    Known("EC2ThrottledException", 503, "Request limit exceeded.", _EC2),
    Known("BandwidthLimitExceeded", 503, "Bandwidth limit exceeded.", _EC2),
    Known("Throttling", 400, "Rate exceeded", frozenset({"ec2", "sts"})),
    Known("ThrottlingException", 400, "Rate exceeded", EVERY),
    Known("RequestThrottled", 403, "Request is throttled.", frozenset({"sqs"})),
    # AWS's own trouble: back off
    Known("InternalError", 500, "An internal error has occurred", _EC2),
    Known("ServerInternal", 500, "An internal error has occurred", _EC2),
    Known("InternalFailure", 500, "The request processing has failed because of an unknown error.", EVERY),
    Known("InternalException", 500, "This exception occurs due to unexpected causes.", frozenset({"events"})),
    Known("ServiceUnavailable", 503, "The service is unavailable. Please try again shortly.", EVERY),
    Known("Unavailable", 503, "The service is unavailable. Please try again shortly.", _EC2),
    # eventual consistency: wait, do not conclude
    Known("InvalidInstanceID.NotFound", 400, "The instance ID does not exist", _EC2),
    Known("InvalidFleetId.NotFound", 400, "The fleet ID does not exist.", _EC2),
    Known("InvalidLaunchTemplateId.NotFound", 400, "The specified launch template does not exist.", _EC2),
    # who asks: stop and say which permission
    Known("UnauthorizedOperation", 403, "You are not authorized to perform this operation.", _EC2),
    Known("AuthFailure", 401, "AWS was not able to validate the provided access credentials", _EC2),
    Known("Blocked", 403, "This account is currently blocked and not recognized as a valid account. Please contact "
          "AWS Support.", _EC2),
    Known("PendingVerification", 400, "Your request for accessing resources in this region is being validated.", _EC2),
    Known("OptInRequired", 403, "You are not subscribed to this service.", EVERY),
    Known("AccessDenied", 403, "User is not authorized to perform this action.", _QUERY),
    Known("AccessDeniedException", 400, "User is not authorized to perform this action.", _JSON),
    Known("InvalidClientTokenId", 403, "The security token included in the request is invalid.", _QUERY | _EC2),
    Known("UnrecognizedClientException", 403, "The security token included in the request is invalid.", _JSON),
    Known("MissingAuthenticationToken", 403, "Request is missing Authentication Token", EVERY),
    Known("SignatureDoesNotMatch", 403, "The request signature we calculated does not match the signature you "
          "provided. Check your AWS Secret Access Key and signing method.", _QUERY | _EC2),
    Known("InvalidSignatureException", 403, "The request signature we calculated does not match the signature you "
          "provided. Check your AWS Secret Access Key and signing method.", _JSON),
    Known("RequestExpired", 400, "Request has expired.", EVERY),
    Known("ExpiredToken", 403, "The security token included in the request is expired", _QUERY | _EC2),
    Known("ExpiredTokenException", 403, "The security token included in the request is expired", _JSON),
    # what was asked
    Known("DryRunOperation", 412, "Request would have succeeded, but DryRun flag is set.", _EC2),
    Known("IdempotentParameterMismatch", 400, "The client token was used with other parameters before.", _EC2),
    Known("InvalidParameterValue", 400, "A value specified in a parameter is not valid.", EVERY),
    Known("InvalidFleetConfiguration", 400, "Your requested instance type is not supported in your requested "
          "Availability Zone.", _EC2),
    Known("Unsupported", 400, "The requested configuration is currently not supported.", _EC2),
    Known("OverLimit", 403, "The specified action violates a limit.", frozenset({"sqs"})),
)  # fmt: skip

_BY_CODE = {one.code: one for one in _KNOWN}

POOL_CODES = (
    "InsufficientInstanceCapacity",
    "SpotMaxPriceTooLow",
    "UnfulfillableCapacity",
    "MaxSpotInstanceCountExceeded",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "InvalidFleetConfiguration",
    "Unsupported",
)
"""What CreateFleet answers for one pool, in its Errors."""


def known(code: str) -> Known | None:
    """The catalogue's entry, or None."""
    return _BY_CODE.get(code)


def codes() -> list[str]:
    """Every code of the catalogue."""
    return list(_BY_CODE)


def failure(code: str, message: str | None = None, status: int | None = None) -> Failure:
    """The error to answer for a code; what is given goes before the catalogue's.

    A code that nobody knows is answered with HTTP 400 unless `status` says otherwise.
    """
    entry = known(code)
    if entry is None:
        return Failure(code, message or code, status or 400)
    return Failure(code, message or entry.message, status or entry.status)
