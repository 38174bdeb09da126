"""Filters and pages, as every Describe action of EC2 has them."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gpucost.rehearsal.api.wire import Ec2Error

Item = TypeVar("Item")


@functools.lru_cache(maxsize=1024)
def pattern(text: str) -> re.Pattern[str]:
    """EC2's filter wildcards: * any characters, ? one, a backslash makes either of them plain."""
    made = []
    for part in re.findall(r"\\.|.", text, flags=re.DOTALL):
        if part == "*":
            made.append(".*")
        elif part == "?":
            made.append(".")
        else:
            made.append(re.escape(part[-1]))
    return re.compile("".join(made), flags=re.DOTALL)


def select(
    items: Sequence[Item],
    wanted: list[dict[str, Any]] | None,
    known: Mapping[str, Callable[[Item], Iterable[str]]],
    tags: Callable[[Item], Mapping[str, str]],
) -> list[Item]:
    """The items that match every filter (filters are joined by AND, the values of one by OR).

    Args:
        items: what to select from.
        wanted: the request's Filters: dicts of Name and Values.
        known: filter name -> the values that an item has for it.
        tags: an item's tags, for tag:KEY and tag-key.

    Raises:
        Ec2Error: InvalidParameterValue for a filter that the action does not have.
    """
    chosen = list(items)
    for entry in wanted or []:
        name = entry.get("Name", "")
        patterns = [pattern(value) for value in entry.get("Values") or []]
        values: Callable[[Item], Iterable[str]]
        if name.startswith("tag:"):
            values = functools.partial(_tag_values, tags, name.removeprefix("tag:"))
        elif name == "tag-key":
            values = functools.partial(_tag_keys, tags)
        elif name in known:
            values = known[name]
        else:
            raise Ec2Error("InvalidParameterValue", f"The filter '{name}' is invalid")
        chosen = [item for item in chosen if any(p.fullmatch(value) for p in patterns for value in values(item))]
    return chosen


def _tag_values(tags: Callable[[Item], Mapping[str, str]], key: str, item: Item) -> Iterable[str]:
    found = tags(item)
    return [found[key]] if key in found else []


def _tag_keys(tags: Callable[[Item], Mapping[str, str]], item: Item) -> Iterable[str]:
    return tags(item)


def page(
    items: Sequence[Item], request: Mapping[str, Any], *, default: int = 1000, largest: int = 1000
) -> tuple[list[Item], str | None]:
    """One page of `items`, and the token of the next page, or None when this is the last.

    Raises:
        Ec2Error: InvalidParameterValue for a MaxResults out of range; InvalidNextToken for a token not from here.
    """
    size = request.get("MaxResults")
    if size is not None and size < 1:
        raise Ec2Error("InvalidParameterValue", f"Value ( {size} ) for parameter maxResults is invalid.")
    size = min(size or default, largest)
    first = decode_token(request.get("NextToken"))[0]
    last = first + size
    return list(items[first:last]), encode_token(last) if last < len(items) else None


def encode_token(offset: int, pinned: str = "") -> str:
    """A NextToken: where the next page begins, and what must stay as it was for the first page."""
    return base64.urlsafe_b64encode(f"{offset}|{pinned}".encode()).decode()


def decode_token(token: str | None) -> tuple[int, str]:
    """The inverse of `encode_token`; (0, "") for none."""
    if not token:
        return 0, ""
    try:
        offset, _, pinned = base64.urlsafe_b64decode(token.encode()).decode().partition("|")
        return int(offset), pinned
    except (ValueError, binascii.Error) as error:
        raise Ec2Error("InvalidNextToken", f"The token '{token}' is invalid") from error
