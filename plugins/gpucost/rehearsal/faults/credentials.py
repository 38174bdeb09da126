"""Who may call? Access keys that are disabled, credentials that have expired, permissions that were taken away.

By default every access key may do everything. What each service answers:
    EC2: https://docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html (AuthFailure, UnauthorizedOperation,
    MissingAuthenticationToken; RequestExpired for a request that is 15 minutes off and for expired credentials)
    others: CommonErrors of their API references; STS and SQS say ExpiredToken and SignatureDoesNotMatch, services
    with JSON protocols ExpiredTokenException and InvalidSignatureException, as SDKs' reports show.
Expiry is real time: credentials live in the callers' time, not in the rehearsal's.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import secrets
import string
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gpucost.rehearsal.faults.kept import KeptFile
from gpucost.rehearsal.protocol.catalogue import Failure, failure
from gpucost.rehearsal.protocol.reading import UNSIGNED_ACTIONS, Call

log = logging.getLogger(__name__)

TOLERANCE = timedelta(minutes=15)
"""How far a signature's time may be from the cloud's clock."""

ISSUING = frozenset({"AssumeRole", "GetSessionToken", "GetFederationToken"}) | UNSIGNED_ACTIONS

MOTO_EXAMPLE_KEY = "AKIAIOSFODNN7EXAMPLE"
"""moto issues this one key with every session token; AWS's differ."""


class Denial(BaseModel):
    """A permission that is taken away."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    access_key: str = Field(default="*", description="Pattern.")
    action: str = Field(
        description="Pattern for SERVICE:ACTION as in IAM policies: ec2:CreateFleet, sqs:*", pattern=":"
    )


class CredentialsChange(BaseModel):
    """The body of POST /rehearsal/credentials. `clear` comes first, so a change can also be a fresh start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clear: bool = Field(default=False, description="Give back everything that was taken.")
    deny: list[Denial] = Field(default=[], description="Permissions to take away.")
    disable: list[str] = Field(default=[], description="Patterns of access keys that no longer exist.")
    expire: list[str] = Field(default=[], description="Access keys that are expired now; patterns for issued ones.")


class _Kept(BaseModel):
    """What the file holds."""

    deny: list[Denial] = []
    disable: list[str] = []
    expire: list[str] = []
    issued: dict[str, AwareDatetime] = {}


class Credentials:
    """Knows which requests are refused for who asks; safe to use from many threads.

    Args:
        account: named in messages.
        real_now: real time, aware.
        kept_in: a file that remembers all of it over a restart of the cloud; None: it is forgotten.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(
        self,
        account: str,
        real_now: Callable[[], datetime] = lambda: datetime.now(UTC),
        kept_in: Path | None = None,
    ) -> None:
        self._account = account
        self._real_now = real_now
        self._lock = threading.Lock()
        self._kept = KeptFile(kept_in)
        document = self._kept.read()
        try:
            kept = _Kept.model_validate(document)
        except ValidationError as error:
            raise self._kept.damaged(error) from error
        self._denied, self._disabled = kept.deny, kept.disable
        self._expired, self._until = set(kept.expire), kept.issued

    def change(self, wanted: CredentialsChange) -> None:
        """Take permissions and keys away, or give them back.

        Raises:
            ValueError: `expire` has a pattern that no issued access key matches.
        """
        with self._lock:
            expired = {key for pattern in wanted.expire for key in self._issued(pattern)}
            if wanted.clear:
                self._denied, self._disabled, self._expired = [], [], set()
            self._denied += wanted.deny
            self._disabled += wanted.disable
            self._expired |= expired
            self._kept.write(self._document())

    def _issued(self, pattern: str) -> list[str]:
        if not set(pattern) & set("*?["):
            return [pattern]
        matching = fnmatch.filter(self._until, pattern)
        if not matching:
            raise ValueError(f"expire: got {pattern!r}, expected a pattern for a key that STS issued here, or a key")
        return matching

    def as_json(self) -> dict[str, Any]:
        """What was taken away, and the issued access keys with their ends. No secrets: there are none here."""
        with self._lock:
            return self._document()

    def _document(self) -> dict[str, Any]:
        return {
            "deny": [one.model_dump() for one in self._denied],
            "disable": list(self._disabled),
            "expire": sorted(self._expired),
            "issued": {key: until.isoformat() for key, until in self._until.items()},
        }

    def refusal(self, call: Call, signed_at: datetime | None, skew_s: float) -> Failure | None:
        """The error for a request that may not be done, or None.

        Args:
            call: who asks what.
            signed_at: the signature's time; None when it tells none.
            skew_s: how far the cloud's clock is ahead.
        """
        key = call.access_key
        now = self._real_now()
        with self._lock:
            if not key:
                return _unsigned(call)
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in self._disabled):
                return _invalid_key(call.service)
            told = now + timedelta(seconds=skew_s)
            if signed_at is not None and abs(told - signed_at) > TOLERANCE:
                return _signature_time(call.service, signed_at, told)
            until = self._until.get(key)
            if key in self._expired or (until is not None and until <= told):
                return _expired(call.service)
            asked = f"{call.service}:{call.action}"
            for denial in self._denied:
                if fnmatch.fnmatchcase(key, denial.access_key) and fnmatch.fnmatchcase(asked, denial.action):
                    return _denied(call.service, asked, f"arn:aws:iam::{self._account}:user/{key}")
        return None

    def learn(self, call: Call, body: str) -> str:
        """Remember when credentials end that STS just issued; returns the answer, each with a key of its own."""
        if call.service != "sts" or call.action not in ISSUING:
            return body
        body = body.replace(MOTO_EXAMPLE_KEY, _fresh_key())
        key = re.search(r"<AccessKeyId>([^<]+)</AccessKeyId>", body)
        until = re.search(r"<Expiration>([^<]+)</Expiration>", body)
        if key and until:
            with self._lock:
                self._until[key[1]] = datetime.fromisoformat(until[1]).astimezone(UTC)
                self._kept.write(self._document())
            log.info("%s issued %s until %s", call.action, key[1], until[1])
        return body


def _fresh_key() -> str:
    return "ASIA" + "".join(secrets.choice(string.ascii_uppercase + "234567") for _ in range(16))


def _is_json(service: str) -> bool:
    """Whether the service's codes are those of the JSON protocols; SQS kept the old ones."""
    return service not in {"ec2", "iam", "s3", "sqs", "sts"}


def _unsigned(call: Call) -> Failure | None:
    if call.service != "ec2":
        return None
    return failure("MissingAuthenticationToken", "The request must contain valid credentials.")


def _invalid_key(service: str) -> Failure:
    if service == "ec2":
        return failure("AuthFailure")
    return failure("UnrecognizedClientException" if _is_json(service) else "InvalidClientTokenId")


def _expired(service: str) -> Failure:
    if service == "ec2":
        return failure("RequestExpired")
    return failure("ExpiredTokenException" if _is_json(service) else "ExpiredToken")


def _signature_time(service: str, signed_at: datetime, told: datetime) -> Failure:
    if service == "ec2":
        return failure("RequestExpired")
    if signed_at < told:
        edge = told - TOLERANCE
        message = (
            f"Signature expired: {_basic(signed_at)} is now earlier than {_basic(edge)} ({_basic(told)} - 15 min.)"
        )
    else:
        edge = told + TOLERANCE
        message = (
            f"Signature not yet current: {_basic(signed_at)} is still later than {_basic(edge)} "
            f"({_basic(told)} + 15 min.)"
        )
    return failure("InvalidSignatureException" if _is_json(service) else "SignatureDoesNotMatch", message)


def _denied(service: str, asked: str, who: str) -> Failure:
    reason = f"User: {who} is not authorized to perform: {asked} because no identity-based policy allows the action"
    if service == "ec2":
        return failure("UnauthorizedOperation", f"You are not authorized to perform this operation. {reason}.")
    return failure("AccessDeniedException" if _is_json(service) else "AccessDenied", reason)


def _basic(moment: datetime) -> str:
    """ISO 8601's basic form, as signatures have it."""
    return moment.strftime("%Y%m%dT%H%M%SZ")
