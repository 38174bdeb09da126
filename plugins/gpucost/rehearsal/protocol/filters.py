"""Filters and pages, as every Describe action of EC2 has them."""

from __future__ import annotations

import base64
import binascii
import bisect
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gpucost.rehearsal.protocol.wire import Ec2Error

Item = TypeVar("Item")


@functools.lru_cache(maxsize=1024)
def pattern(text: str) -> re.Pattern[str]:
    """EC2's filter wildcards: * any characters, ? one, a backslash makes either of them plain.

    The first place where the text between two stars fits is as good as any later one, so it is taken for good: an
    expression that tries them all would need time that multiplies with each star.
    """
    parts = [""]
    for part in re.findall(r"\\.|.", text, flags=re.DOTALL):
        if part == "*":
            parts.append("")
        else:
            parts[-1] += "." if part == "?" else re.escape(part[-1])
    if len(parts) == 1:
        return re.compile(parts[0], flags=re.DOTALL)
    first, *between, last = parts
    made = "".join(f"(?>.*?{part})" for part in between if part)
    return re.compile(f"{first}{made}.*{last}", flags=re.DOTALL)


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
    items: Sequence[Item],
    request: Mapping[str, Any],
    *,
    sizes: range = range(5, 1001),
    default: int | None = None,
    number: Callable[[Item], int] | None = None,
) -> tuple[list[Item], str | None]:
    """One page of `items`, and the token of the next page, or None when this is the last.

    Args:
        items: of all pages.
        request: its MaxResults and NextToken.
        sizes: the values of MaxResults that the action takes.
        default: the size of a page when the request names none; left out: the largest.
        number: by which items are ordered, for lists out of which items fall while somebody turns pages: the next
            page begins behind the last item's number, wherever that is then. Left out: by the place in the list.

    Raises:
        Ec2Error: InvalidParameterValue for another MaxResults; InvalidNextToken for a token not from here.
    """
    size = page_size(request, sizes, default)
    begin = decode_token(request.get("NextToken"))[0]
    first = begin if number is None else bisect.bisect_left(items, begin, key=number)
    last = first + size
    if last >= len(items):
        return list(items[first:]), None
    return list(items[first:last]), encode_token(last if number is None else number(items[last]))


def page_size(request: Mapping[str, Any], sizes: range, default: int | None = None) -> int:
    """The size of a page, as `page` takes it; EC2's words: aws/aws-sdk-ruby#2575."""
    size = request.get("MaxResults")
    if size is None:
        return default or sizes[-1]
    if size in sizes:
        return int(size)
    wanted = f"a value greater than {sizes[0]}" if size < sizes[0] else f"a value less than {sizes[-1]}"
    raise Ec2Error(
        "InvalidParameterValue", f"Value ( {size} ) for parameter maxResults is invalid. Expecting {wanted}."
    )


def encode_token(offset: int, pinned: str = "") -> str:
    """A NextToken: where the next page begins, and what must stay as it was for the first page."""
    return base64.urlsafe_b64encode(f"{offset}|{pinned}".encode()).decode()


def decode_token(token: str | None) -> tuple[int, str]:
    """The inverse of `encode_token`; (0, "") for none."""
    if not token:
        return 0, ""
    try:
        offset, _, pinned = base64.urlsafe_b64decode(token.encode()).decode().partition("|")
    except (ValueError, binascii.Error) as error:
        raise Ec2Error("InvalidNextToken", f"The token '{token}' is invalid") from error
    if not (offset.isascii() and offset.isdigit()):
        raise Ec2Error("InvalidNextToken", f"The token '{token}' is invalid")
    return int(offset), pinned
