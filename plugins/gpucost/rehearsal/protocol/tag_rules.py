"""Which tags may a resource have? Limits, and how requests name them.

Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html, "Tag naming and usage limits".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gpucost.rehearsal.protocol import wire
from gpucost.rehearsal.protocol.wire import Ec2Error

MOST_TAGS = 50
LONGEST_KEY = 128
LONGEST_VALUE = 256
RESERVED = "aws:"


def read(tags: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """The tags of a request, checked.

    Raises:
        Ec2Error: InvalidParameterValue for a key or value that no tag can have, or a key that comes twice.
    """
    listed = [(str(tag.get("Key") or ""), str(tag.get("Value") or "")) for tag in tags or []]
    for key, times in Counter(key for key, _ in listed).items():
        if times > 1:
            raise Ec2Error("InvalidParameterValue", f"Duplicate tag key '{key}' specified.")
    for key, value in listed:
        if not key:
            raise Ec2Error("InvalidParameterValue", "Tag keys cannot be empty")
        if key.lower().startswith(RESERVED):
            raise Ec2Error(
                "InvalidParameterValue", f"Tag keys starting with 'aws:' are reserved for internal use: {key}"
            )
        if len(key) > LONGEST_KEY:
            raise Ec2Error("InvalidParameterValue", f"Tag key exceeds the maximum length of {LONGEST_KEY} characters")
        if len(value) > LONGEST_VALUE:
            raise Ec2Error(
                "InvalidParameterValue", f"Tag value exceeds the maximum length of {LONGEST_VALUE} characters"
            )
    return dict(listed)


def check_number(tags: Mapping[str, str]) -> None:
    """Refuse more tags than a resource can have; AWS's own do not count. Raises Ec2Error: TagLimitExceeded."""
    if sum(1 for key in tags if not key.startswith(RESERVED)) > MOST_TAGS:
        raise Ec2Error("TagLimitExceeded", f"The maximum number of {MOST_TAGS} tags for a resource has been reached.")


def tags_for(specifications: Iterable[Mapping[str, Any]] | None, kind: str) -> dict[str, str]:
    """The tags for resources of `kind` in a TagSpecifications list, checked as `read` does."""
    found: dict[str, str] = {}
    for specification in specifications or []:
        named = specification.get("ResourceType")
        if named not in wire.values_of("ResourceType"):
            raise Ec2Error(
                "InvalidParameterValue", f"'{named}' is not a valid taggable resource type for this operation."
            )
        if named == kind:
            found |= read(specification.get("Tags"))
    check_number(found)
    return found
