"""How a node gets what it needs without a secret in its user data: the start script, and where credentials come from.

A node knows three things from outside: the store's address (in the script, the same for every node of a site),
its lease, job and attempt (its tags, read from the metadata service), and its credentials (its role, through the
default chain, renewed by the cloud).
"""

from __future__ import annotations

import shlex
from typing import Protocol

from gpucost.capacity.sites import Site, StoreSettings

TAG_LEASE = "gpucost:lease"
TAG_JOB = "gpucost:job"
TAG_ATTEMPT = "gpucost:attempt"
TAG_EXPIRES = "gpucost:expires"

MAX_USER_DATA_BYTES = 16 * 1024
"""EC2's limit for user data, before encoding."""


class NodeAccess(Protocol):
    """How the nodes of one provider come to credentials, and how these renew."""

    def start_script(self, site: Site, agent_key: str) -> str:
        """The script that a node runs at its first boot; holds no secret."""
        ...


class RoleAccess:
    """The machine's role gives credentials through the metadata service, and renews them."""

    def start_script(self, site: Site, agent_key: str) -> str:
        """Fetch the agent, run it, and end the machine, whatever happens."""
        script = _SCRIPT.format(
            url=shlex.quote(site.store.url),
            endpoint=shlex.quote(site.store.endpoint or ""),
            region=shlex.quote(site.store.region),
            bucket=shlex.quote(_bucket(site.store)),
            agent=shlex.quote(_key(site.store, agent_key)),
        )
        if len(script.encode()) > MAX_USER_DATA_BYTES:
            raise ValueError(f"user data: {len(script.encode())} bytes, expected at most {MAX_USER_DATA_BYTES}")
        return script


_SCRIPT = """#!/bin/bash
# A gpucost node: fetch the agent, run it, end the machine. Which job, the instance's tags say.
# The agent's watchdog uses the same command, should the agent not end by itself.
export GPUCOST_SHUTDOWN='shutdown -h now'
trap "$GPUCOST_SHUTDOWN" EXIT
export GPUCOST_STORE_URL={url} GPUCOST_STORE_ENDPOINT={endpoint} GPUCOST_STORE_REGION={region}
timeout -k 10 300 python3 - {bucket} {agent} <<'FETCH' || exit 1
import os, sys, boto3
s3 = boto3.client("s3", endpoint_url=os.environ["GPUCOST_STORE_ENDPOINT"] or None,
                  region_name=os.environ["GPUCOST_STORE_REGION"])
s3.download_file(sys.argv[1], sys.argv[2], "agent.zip")
FETCH
python3 agent.zip
"""


def _bucket(store: StoreSettings) -> str:
    return store.url.split("://", 1)[1].split("/", 1)[0]


def _key(store: StoreSettings, key: str) -> str:
    prefix = store.url.split("://", 1)[1].partition("/")[2].strip("/")
    return f"{prefix}/{key}" if prefix else key
