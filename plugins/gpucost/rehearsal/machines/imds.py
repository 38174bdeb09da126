"""What does an instance know about itself? The instance metadata service, version 2 only, one for each instance.

Its address is http://127.0.0.1:PORT/imds/INSTANCE-ID/, given to the instance in its environment as
AWS_EC2_METADATA_SERVICE_ENDPOINT, so that every AWS SDK finds it through its default credential chain.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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
        region, zones: the region, and zone name -> zone id.
        account: the account id for the identity document.
        role_credentials: mode-600 JSON file, read again for every request so that it can be renewed.
        real_now: real time: credentials expire in the node's time, not the rehearsal's.
    """

    def __init__(
        self,
        book: Book,
        *,
        region: str,
        zones: Mapping[str, str],
        account: str,
        role_credentials: Path | None,
        real_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._book = book
        self._region = region
        self._zones = zones
        self._account = account
        self._role_credentials = role_credentials
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
        if path == "latest/dynamic/instance-identity/document":
            return Answer(200, json.dumps(self._identity(instance), indent=2))
        if path == "latest/user-data" and instance.spec.user_data is not None:
            return Answer(200, instance.spec.user_data.decode("utf-8", errors="replace"), "application/octet-stream")
        if path.startswith("latest/meta-data/"):
            return self._meta_data(instance, path.removeprefix("latest/meta-data/"))
        return NOT_FOUND

    def _token(self, instance_id: str, headers: Mapping[str, str]) -> Answer:
        ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TOKEN_TTL_S:
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

    def _meta_data(self, instance: Instance, path: str) -> Answer:
        zone = instance.pool.zone
        facts = {
            "instance-id": instance.id,
            "instance-type": instance.pool.instance_type,
            "instance-life-cycle": instance.lifecycle,
            "ami-id": instance.spec.image_id or "",
            "local-ipv4": private_address(instance),
            "placement/availability-zone": zone,
            "placement/availability-zone-id": self._zones[zone],
            "placement/region": self._region,
        }
        if path in facts:
            return Answer(200, facts[path])
        if path.startswith("iam/security-credentials"):
            return self._credentials(instance, path.removeprefix("iam/security-credentials").strip("/"))
        if path == "tags/instance" or path.startswith("tags/instance/"):
            return self._tags(instance, path.removeprefix("tags/instance").removeprefix("/"))
        if path == "spot/instance-action" and instance.action_at is not None:
            action = {"action": "terminate", "time": iso(instance.action_at)}
            return Answer(200, json.dumps(action), "application/json")
        return NOT_FOUND

    def _tags(self, instance: Instance, key: str) -> Answer:
        if not instance.spec.metadata_tags:
            return NOT_FOUND
        if not key:
            return Answer(200, "\n".join(sorted(instance.tags)))
        return Answer(200, instance.tags[key]) if key in instance.tags else NOT_FOUND

    def _credentials(self, instance: Instance, role: str) -> Answer:
        if self._role_credentials is None or instance.spec.profile is None:
            return NOT_FOUND
        name = instance.spec.profile.rpartition("/")[2]
        if not role:
            return Answer(200, name)
        if role != name:
            return NOT_FOUND
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
        return Answer(200, json.dumps(document), "application/json")

    def _identity(self, instance: Instance) -> dict[str, Any]:
        return {
            "accountId": self._account,
            "architecture": "x86_64",
            "availabilityZone": instance.pool.zone,
            "imageId": instance.spec.image_id,
            "instanceId": instance.id,
            "instanceType": instance.pool.instance_type,
            "pendingTime": iso(instance.launched),
            "privateIp": private_address(instance),
            "region": self._region,
            "version": "2017-09-30",
        }


def private_address(instance: Instance) -> str:
    """An address of its own on loopback, where the instance's programs can really listen."""
    number = instance.number + 1
    return f"127.{64 + (number >> 16) % 64}.{(number >> 8) & 255}.{number & 255}"
