"""How are faults added and cleared while the cloud runs? The endpoints /rehearsal/faults and /rehearsal/credentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpucost.rehearsal.faults.credentials import Credentials, CredentialsChange
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import FaultSet

Reply = tuple[int, dict[str, Any] | str]
"""Status, and a document for JSON or text for CSV."""


class ClearRequest(BaseModel):
    """The body of POST /rehearsal/faults/clear; `{}` clears all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str | None = Field(default=None, description="One rule's id.")


class FaultsControl:
    """Answers the endpoints of faults; what is wrong with a body is pydantic's ValidationError, as for all of them.

    Args:
        injector, credentials: what is looked at and changed.
    """

    def __init__(self, injector: Injector, credentials: Credentials) -> None:
        self._injector = injector
        self._credentials = credentials

    def routes(self) -> dict[tuple[str, str], Callable[[bytes], Reply]]:
        """Method and name below /rehearsal/ -> what answers."""
        return {
            ("GET", "faults"): lambda _body: (200, {"rules": self.rules()}),
            ("POST", "faults"): self._add,
            ("POST", "faults/clear"): self._clear,
            ("GET", "credentials"): lambda _body: (200, self._credentials.as_json()),
            ("POST", "credentials"): self._change,
        }

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with how many requests it matched and how often it fired."""
        return self._injector.as_json()

    def _add(self, body: bytes) -> Reply:
        wanted = FaultSet.model_validate_json(body)
        try:
            added = self._injector.add(wanted.rules)
        except ValueError as error:
            return 409, {"error": str(error)}
        return 200, {"added": [rule.id for rule in added], "rules": self.rules()}

    def _clear(self, body: bytes) -> Reply:
        wanted = ClearRequest.model_validate_json(body or b"{}")
        cleared = self._injector.clear(wanted.id)
        if wanted.id is not None and not cleared:
            return 404, {"error": f"id: {wanted.id!r} is no rule's; see /rehearsal/faults"}
        return 200, {"cleared": cleared, "rules": self.rules()}

    def _change(self, body: bytes) -> Reply:
        wanted = CredentialsChange.model_validate_json(body)
        try:
            self._credentials.change(wanted)
        except ValueError as error:
            return 400, {"error": str(error)}
        return 200, self._credentials.as_json()
