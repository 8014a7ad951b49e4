"""Credentials of NATS users as signed claims (JWT), made here and nowhere else.

An operator vouches for an account, the account for its users. The server knows the operator and the account only: its
configuration holds no secret, a user's permissions and his last day are in his own claims, and new users need no word
to the server. A `.creds` file has the claims and the seed that proves whose they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import BrokerError
from broker.files import write_private
from broker.permissions import Permissions

_UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
_ACCOUNT = {**_UNLIMITED, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
_JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
_OPERATOR_PREFIX, _ACCOUNT_PREFIX, _USER_PREFIX = 14 << 3, 0, 20 << 3


class Key:
    """A signing key: `seed` is the secret, `public` its name."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pair = _nkeys().from_seed(seed.encode())
        self.public = self._pair.public_key.decode()

    @classmethod
    def new(cls, prefix: int) -> Key:
        """A new one, of an operator, an account or a user."""
        seed: bytes = _nkeys().encode_seed(secrets.token_bytes(32), prefix)
        return cls(seed.decode())

    def sign(
        self, subject: str, name: str, nats: dict[str, Any], *, expires: float | None = None, issued: int | None = None
    ) -> str:
        """Claims about `subject`, signed; `expires` and `issued` (now, if not given) in seconds since 1970."""
        body: dict[str, Any] = {
            "iat": int(time.time()) if issued is None else issued,
            "iss": self.public,
            "name": name,
            "sub": subject,
        }
        body |= {"nats": {**nats, "version": 2}} | ({"exp": int(expires)} if expires is not None else {})
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = f"{_plain({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_plain(body)}"
        return f"{text}.{_base64(self._pair.sign(text.encode()))}"


@dataclass(frozen=True, slots=True)
class Authority:
    """Who vouches for the users of a server: the keys of an operator, of an account, and of the server's own one."""

    operator: Key
    account: Key
    system: Key
    issued: int
    """When they were made (seconds since 1970): a server reads its configuration again only if its operator's claims
    are the same to the letter."""
    revoked: int = 0
    """Credentials that were given before (seconds since 1970) are refused."""

    @classmethod
    def new(cls) -> Authority:
        """A new one."""
        return cls(Key.new(_OPERATOR_PREFIX), Key.new(_ACCOUNT_PREFIX), Key.new(_ACCOUNT_PREFIX), int(time.time()))

    def save(self, path: Path) -> None:
        """Write the secrets, for this user only."""
        seeds = {name: getattr(self, name).seed for name in ("operator", "account", "system")}
        write_private(path, json.dumps({**seeds, "issued": self.issued, "revoked": self.revoked}))

    @classmethod
    def load(cls, path: Path) -> Authority:
        """Read what `save` wrote.

        Raises:
            BrokerError: it is something else.
        """
        try:
            body = json.loads(path.read_text())
            return cls(
                Key(body["operator"]), Key(body["account"]), Key(body["system"]), body["issued"], body["revoked"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{path} holds no keys of an operator: {error}; restore it, or make all keys anew in another folder"
            raise BrokerError(msg) from error

    def server_config(self) -> str:
        """What a server must know to check credentials; no secret."""
        account = {"type": "account", "limits": _ACCOUNT | _JETSTREAM, "default_permissions": {"pub": {}, "sub": {}}}
        if self.revoked:
            account["revocations"] = {"*": self.revoked}
        system = {"type": "account", "limits": _ACCOUNT, "default_permissions": {"pub": {}, "sub": {}}}
        operator = {"type": "operator", "system_account": self.system.public}
        # The server's monitoring tells an account by the name in its claims, and those that ask by its key.
        name = self.account.public
        own = self.operator.sign(name, name, account, issued=max(self.issued, self.revoked))
        servers = self.operator.sign(self.system.public, "SYS", system, issued=self.issued)
        return (
            f"operator: {self.operator.sign(self.operator.public, 'relax', operator, issued=self.issued)}\n"
            f"system_account: {self.system.public}\n"
            "resolver: MEMORY\n"
            "resolver_preload: {\n"
            f"  {self.account.public}: {own}\n"
            f"  {self.system.public}: {servers}\n"
            "}\n"
        )

    def credentials(self, name: str, permissions: Permissions, expires: float | None = None) -> str:
        """Content of a `.creds` file for a new user."""
        user = Key.new(_USER_PREFIX)
        # An empty list would allow all.
        pub, sub = (
            {"allow": list(allowed)} if allowed else {"deny": [">"]}
            for allowed in (permissions.publish, permissions.subscribe)
        )
        claims = self.account.sign(
            user.public, name, {"type": "user", **_UNLIMITED, "pub": pub, "sub": sub}, expires=expires
        )
        return (
            f"-----BEGIN NATS USER JWT-----\n{claims}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """What a `.creds` file says of its user: a name, and the prefix of the answers that he may hear; None if any."""

    name: str
    inbox: str | None


def claims_of(path: Path) -> Claims:
    """Read a `.creds` file; its signature is the server's to check.

    Raises:
        BrokerError: the file is none.
    """
    try:
        text = path.read_text().split("-----BEGIN NATS USER JWT-----", 1)[1].split()[0].split(".")[1]
        body = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        heard = body["nats"].get("sub", {}).get("allow", [])
        name = str(body["name"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        msg = f"{path} is no file of NATS credentials ({type(error).__name__}: {error}); mend broker.credentials"
        raise BrokerError(msg) from error
    inbox = next((pattern.removesuffix(".>") for pattern in heard if pattern.startswith("_INBOX")), None)
    return Claims(name, inbox)


def _nkeys() -> Any:
    import nkeys  # noqa: PLC0415 only those that sign pay for it

    return nkeys


def _plain(body: dict[str, Any]) -> str:
    return _base64(json.dumps(body, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
