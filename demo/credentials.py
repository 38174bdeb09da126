"""Secrets of a stack: made once, kept in files that only their owner reads."""

from __future__ import annotations

import base64
import json
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from .records import write_private
from .settings import StackError


class KeyPair(BaseModel):
    """An access key and its secret."""

    model_config = ConfigDict(frozen=True)

    access_key: str
    secret_key: str = Field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A random pair in the form that AWS uses (20 and 40 characters)."""
        return cls(access_key="GPC" + secrets.token_hex(9)[:17].upper(), secret_key=secrets.token_hex(20))


class Credentials(BaseModel):
    """All secrets of one stack."""

    model_config = ConfigDict(frozen=True)

    store: KeyPair = Field(description="Airflow's and MLflow's key to the object store.")
    node: KeyPair = Field(description="The role of rented nodes: the only key that a node ever sees.")
    cloud: KeyPair = Field(description="The buyer's key at the rehearsal cloud.")
    passwords: dict[str, str] = Field(repr=False, description="Airflow's users.")
    jwt_secret: str = Field(repr=False)
    fernet_key: str = Field(repr=False)
    api_secret: str = Field(repr=False, description="Signs Airflow's sessions and requests for logs.")

    @classmethod
    def new(cls) -> Credentials:
        """Fresh random secrets."""
        return cls(
            store=KeyPair.new(),
            node=KeyPair.new(),
            cloud=KeyPair.new(),
            passwords={user: secrets.token_urlsafe(12) for user in ("admin", "viewer")},
            jwt_secret=secrets.token_hex(48),
            fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            api_secret=secrets.token_hex(24),
        )

    def values(self) -> list[str]:
        """Every value that must not be shown."""
        pairs = [self.store.secret_key, self.node.secret_key, self.cloud.secret_key]
        return [*pairs, *self.passwords.values(), self.jwt_secret, self.fernet_key, self.api_secret]


class SecretFiles:
    """The folder HOME/secrets (mode 700) with one file (mode 600) per reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store_config = folder / "s3.json"
        self.node = folder / "node.json"
        self.passwords = folder / "passwords.json"
        self._all = folder / "stack.json"

    def load(self) -> Credentials:
        """The secrets of the earlier starts, or new ones at the first; the readers' files are there afterwards.

        Raises:
            StackError: the file is damaged; the message shows nothing of what is in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        if self._all.exists():
            credentials = self._read()
        else:
            credentials = Credentials.new()
            write_private(self._all, credentials.model_dump_json(indent=2))
        write_private(self.node, credentials.node.model_dump_json())
        write_private(self.passwords, json.dumps(credentials.passwords) + "\n")
        write_private(self.store_config, json.dumps(_identities(credentials), indent=2))
        return credentials

    def _read(self) -> Credentials:
        try:
            return Credentials.model_validate_json(self._all.read_bytes())
        except ValueError:
            # The reason would quote the file, and what is left of the secrets in it.
            raise StackError(
                f"{self._all} is damaged: run `make down`, remove the file, and start again with new secrets"
            ) from None


def _identities(credentials: Credentials) -> dict[str, object]:
    """SeaweedFS's list of who may do what. Both may do everything until nodes get a role of their own."""
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": pair.access_key, "secretKey": pair.secret_key}],
                "actions": actions,
            }
            for name, pair in (("gpucost", credentials.store), ("node", credentials.node))
        ]
    }
