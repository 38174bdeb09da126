"""Whose requests are answered? Those of programs on this machine; those of web pages are not.

The cloud runs user data, and asks for no secret. A browser on this machine would carry the requests of any web page to
loopback, and a name that a page's owner points at 127.0.0.1 would even let the page read the answers. A browser says so
itself: by the Host that it was told to ask, by Origin, and by Sec-Fetch-Site (https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

JSON = "application/json"

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", flags=re.IGNORECASE)
_OWN_SITES = frozenset({"same-origin", "none"})


def refusal(environ: WSGIEnvironment) -> str | None:
    """Why a request is not answered, as a sentence; None when it is."""
    host = environ.get("HTTP_HOST", "")
    if not _LOOPBACK.fullmatch(host):
        return f"Host: got {host!r}, expected 127.0.0.1, localhost or [::1]: use one of these in the address"
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None:
        return f"Origin: got {origin!r}, expected no such header: web pages may not use the rehearsal cloud"
    site = environ.get("HTTP_SEC_FETCH_SITE")
    if site is not None and site not in _OWN_SITES:
        return f"Sec-Fetch-Site: got {site!r}, expected none: web pages may not use the rehearsal cloud"
    return None


def no_json(environ: WSGIEnvironment) -> str | None:
    """What is wrong with the kind of a body that must be JSON; None when nothing is.

    A page can send forms and plain text to anybody without being asked; JSON it cannot.
    """
    kind = environ.get("CONTENT_TYPE", "")
    if environ.get("REQUEST_METHOD") == "POST" and kind.partition(";")[0].strip().lower() != JSON:
        return f"Content-Type: got {kind!r}, expected {JSON}: send the header with the body"
    return None
