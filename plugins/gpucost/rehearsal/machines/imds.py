"""What does an instance know about itself? The instance metadata service, version 2 only, one for each instance.

Its address is http://127.0.0.1:PORT/imds/INSTANCE-ID/, given to the instance in its environment as
AWS_EC2_METADATA_SERVICE_ENDPOINT, so that every AWS SDK finds it through its default credential chain.

Which items there are, and when, follows "Instance metadata categories", "Spot Instance interruption notices" and "EC2
instance rebalance recommendations" in the EC2 user guide. Tokens are forgotten when the cloud starts again: an
old one is answered with 401, upon which clients fetch another, as they must for one that has expired.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpucost.rehearsal.book.addresses import private_address, private_dns
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.settings import check_private

CREDENTIALS_LAST = timedelta(hours=6)
"""Real time; boto3 renews them when less than about 20 minutes are left."""

MAX_TOKEN_TTL_S = 21_600


@dataclass(frozen=True)
class Answer:
    """An HTTP answer of the metadata service."""

    status: int
    body: str = ""
    kind: str = "text/plain"
    headers: tuple[tuple[str, str], ...] = ()


NOT_FOUND = Answer(404)


def iso(moment: datetime) -> str:
    """As the metadata service writes times: 2026-11-30T16:43:14Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Imds:
    """Answers the metadata requests of all instances.

    Args:
        book: the instances.
        zone_ids: zone name -> zone id.
        account: the account id for the identity document.
        role_credentials: mode-600 JSON file, read again for every request so that it can be renewed.
        skew: how far the times that an instance (by its id) is told are off, for rehearsing with wrong clocks.
        real_now: real time: credentials expire in the node's time, not the rehearsal's.
    """

    def __init__(
        self,
        book: Book,
        *,
        zone_ids: Mapping[str, str],
        account: str,
        role_credentials: Path | None,
        skew: Callable[[str], timedelta] = lambda _instance_id: timedelta(0),
        real_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._book = book
        self._zone_ids = zone_ids
        self._account = account
        self._role_credentials = role_credentials
        self._skew = skew
        self._real_now = real_now
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[str, float]] = {}

    def answer(self, instance_id: str, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """The answer to one request; `path` begins with `latest/`, headers have lower-case names."""
        instance = self._book.get(instance_id)
        if instance is None or instance.state in {"terminated", "stopped"}:
            return NOT_FOUND
        path = path.strip("/")
        if path == "latest/api/token":
            return self._token(instance_id, headers) if method == "PUT" else Answer(405)
        if method != "GET":
            return Answer(405)
        if not self._knows(headers.get("x-aws-ec2-metadata-token", ""), instance_id):
            return Answer(401)
        return _find(self._items(instance), path) or NOT_FOUND

    def _token(self, instance_id: str, headers: Mapping[str, str]) -> Answer:
        ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= MAX_TOKEN_TTL_S:
            return Answer(400)
        if "x-forwarded-for" in headers:
            return Answer(403)
        token = secrets.token_urlsafe(40)
        with self._lock:
            now = time.monotonic()
            self._tokens = {key: kept for key, kept in self._tokens.items() if kept[1] > now}
            self._tokens[token] = (instance_id, now + int(ttl))
        return Answer(200, token, headers=(("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", ttl),))

    def _knows(self, token: str, instance_id: str) -> bool:
        with self._lock:
            owner, until = self._tokens.get(token, ("", 0.0))
        return owner == instance_id and time.monotonic() < until

    def _items(self, instance: Instance) -> dict[str, Callable[[], Answer]]:
        """Every item that this instance has at this moment: its path, and what makes its answer."""
        items = {f"latest/meta-data/{path}": _constant(text) for path, text in self._facts(instance).items()}
        items |= {f"latest/meta-data/{path}": make for path, make in self._announced(instance).items()}
        if self._role_credentials is not None and instance.spec.profile is not None:
            role = instance.spec.profile.rpartition("/")[2]
            items[f"latest/meta-data/iam/security-credentials/{role}"] = self._credentials
        if instance.spec.user_data is not None:
            text = instance.spec.user_data.decode("utf-8", errors="replace")
            items["latest/user-data"] = _constant(text, "application/octet-stream")
        items["latest/dynamic/instance-identity/document"] = lambda: Answer(
            200, json.dumps(self._identity(instance), indent=2)
        )
        return items

    def _facts(self, instance: Instance) -> dict[str, str]:
        """The items of plain text below meta-data/."""
        zone = instance.pool.zone
        name = private_dns(instance)
        facts = {
            "ami-id": instance.spec.image_id or "",
            "ami-launch-index": str(instance.index),
            "hostname": name,
            "instance-id": instance.id,
            "instance-life-cycle": instance.lifecycle,
            "instance-type": instance.pool.instance_type,
            "local-hostname": name,
            "local-ipv4": private_address(instance),
            "placement/availability-zone": zone,
            "placement/availability-zone-id": self._zone_ids[zone],
            "placement/region": instance.region,
            "services/domain": "amazonaws.com",
            "services/partition": "aws",
        }
        if instance.spec.metadata_tags:
            facts |= {f"tags/instance/{key}": value for key, value in instance.tags.items()}
        return facts

    def _announced(self, instance: Instance) -> dict[str, Callable[[], Answer]]:
        """What EC2 is about to do with it: items that are not there until then."""
        items: dict[str, Callable[[], Answer]] = {}
        action_at, rebalance_at = instance.action_at, instance.rebalance_at
        if action_at is not None:
            items["spot/termination-time"] = lambda: Answer(200, self._told(instance, action_at))
            items["spot/instance-action"] = lambda: _json(
                {"action": "terminate", "time": self._told(instance, action_at)}
            )
        if rebalance_at is not None:
            items["events/recommendations/rebalance"] = lambda: _json(
                {"noticeTime": self._told(instance, rebalance_at)}
            )
        return items

    def _told(self, instance: Instance, moment: datetime) -> str:
        return iso(moment + self._skew(instance.id))

    def _credentials(self) -> Answer:
        assert self._role_credentials is not None  # noqa: S101 (else the item does not exist)
        check_private(self._role_credentials)
        keys = json.loads(self._role_credentials.read_bytes())
        now = self._real_now()
        # The token is empty because static keys with any session token are refused by S3 stand-ins;
        # boto3 takes an empty one for none.
        document = {
            "Code": "Success",
            "LastUpdated": iso(now),
            "Type": "AWS-HMAC",
            "AccessKeyId": keys["access_key"],
            "SecretAccessKey": keys["secret_key"],
            "Token": "",
            "Expiration": iso(now + CREDENTIALS_LAST),
        }
        return _json(document)

    def _identity(self, instance: Instance) -> dict[str, Any]:
        return {
            "accountId": self._account,
            "architecture": "x86_64",
            "availabilityZone": instance.pool.zone,
            "imageId": instance.spec.image_id,
            "instanceId": instance.id,
            "instanceType": instance.pool.instance_type,
            "pendingTime": self._told(instance, instance.launched),
            "privateIp": private_address(instance),
            "region": instance.region,
            "version": "2017-09-30",
        }


def _json(document: Mapping[str, str]) -> Answer:
    return Answer(200, json.dumps(document), "application/json")


def _constant(body: str, kind: str = "text/plain") -> Callable[[], Answer]:
    return lambda: Answer(200, body, kind)


def _find(items: Mapping[str, Callable[[], Answer]], path: str) -> Answer | None:
    """The item of that path; or for a folder what is in it, folders with a slash behind; None when there is neither."""
    if path in items:
        return items[path]()
    folder = f"{path}/" if path else ""
    inside = (item.removeprefix(folder) for item in items if item.startswith(folder))
    names = sorted({name + slash for name, slash, _ in (item.partition("/") for item in inside)})
    return Answer(200, "\n".join(names)) if names else None
