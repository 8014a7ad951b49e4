"""Credentials of NATS users as signed claims (JWT).

An operator signs the accounts, an account signs its users. The server knows only the operator and the accounts: its
configuration holds no secret, and the expiry of a user is in the user's own claims. A `.creds` file holds the claims
and the seed that proves their ownership. `broker.accounts` explains why each user has an account, and
`broker.run_users` which accounts a run has.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.accounts import exports, imports, own_exports, requests_to
from broker.errors import AddressError, BrokerError
from broker.files import write_private
from broker.permissions import Permissions
from broker.run_users import RunUsers

_UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
_ACCOUNT = {**_UNLIMITED, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
MAX_CONNECTIONS, MAX_SUBSCRIPTIONS = 4096, 1024
"""Connections of a user, so that no user takes up those of a server (65536), and subscriptions of one connection."""
_JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
_MAX_CREDENTIALS = 64 << 10
"""Bytes of a `.creds` file that are read."""
MAX_SIGN_IN = 1 << 16
"""Bytes of the line with which a client signs in: it holds the permissions, so it grows with names and roles."""
_NO_DEFAULTS: dict[str, Any] = {"type": "account", "default_permissions": {"pub": {}, "sub": {}}}
_OPERATOR_PREFIX, _ACCOUNT_PREFIX, _USER_PREFIX = 14 << 3, 0, 20 << 3


class SigningKey:
    """An Ed25519 signing key: `seed` is the secret, `public` the encoded public key."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pair = _nkeys().from_seed(seed.encode())
        self.public: str = self._pair.public_key.decode()

    @classmethod
    def new(cls, prefix: int) -> SigningKey:
        """Generate a key; `prefix` marks it as the key of an operator, an account or a user."""
        return cls.of(secrets.token_bytes(32), prefix)

    @classmethod
    def of(cls, secret: bytes, prefix: int) -> SigningKey:
        """Return the key of a secret of 32 bytes."""
        seed: bytes = _nkeys().encode_seed(secret, prefix)
        return cls(seed.decode())

    def sign(
        self, subject: str, name: str, nats: dict[str, Any], *, expires: float | None = None, issued: int | None = None
    ) -> str:
        """Return a signed JWT with NATS-specific claims about the public key `subject`.

        `expires` and `issued` are Unix times in seconds: by default it never expires, and is issued now.
        """
        body: dict[str, Any] = {
            "iat": int(time.time()) if issued is None else issued,
            "iss": self.public,
            "name": name,
            "sub": subject,
        }
        body |= {"nats": {**nats, "version": 2}} | ({"exp": int(expires)} if expires is not None else {})
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = f"{_encode_json({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encode_json(body)}"
        return f"{text}.{_base64(self.sign_bytes(text.encode()))}"

    def sign_bytes(self, data: bytes) -> bytes:
        """Return the signature of some bytes."""
        signature: bytes = self._pair.sign(data)
        return signature


@dataclass(frozen=True, slots=True)
class OperatorKeys:
    """Signing keys of a server's operator and of its system account.

    The keys of all other accounts follow from the operator's.
    """

    operator: SigningKey
    system: SigningKey
    issued: int
    """Creation time (Unix seconds). A server reloads its configuration only if the operator's claims are identical, so
    they are always signed with this time."""

    @classmethod
    def new(cls) -> OperatorKeys:
        """Generate new keys."""
        return cls(SigningKey.new(_OPERATOR_PREFIX), SigningKey.new(_ACCOUNT_PREFIX), int(time.time()))

    def save(self, path: Path) -> None:
        """Write the secret seeds, readable by this user only."""
        seeds = {name: getattr(self, name).seed for name in ("operator", "system")}
        write_private(path, json.dumps({**seeds, "issued": self.issued}))

    @classmethod
    def load(cls, path: Path, otherwise: str = "create all keys in another folder") -> OperatorKeys:
        """Read keys written by `save`; `otherwise` is the remedy if the file is lost.

        Raises:
            BrokerError: the file cannot be read or holds something else.
        """
        try:
            body = json.loads(path.read_text())
            return cls(SigningKey(body["operator"]), SigningKey(body["system"]), body["issued"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{path} does not hold operator keys: {error}; restore it, or {otherwise}"
            raise BrokerError(msg) from error

    def account_of(self, run: str, user: str = "") -> SigningKey:
        """Return the key of the account of a run's streams, or of one of its users."""
        secret = hashlib.sha256(f"{self.operator.seed} account {run}.{user}".encode()).digest()
        return SigningKey.of(secret, _ACCOUNT_PREFIX)

    def server_config(self, runs: Iterable[RunUsers]) -> str:
        """Server configuration to check the credentials of several runs with; contains no secret."""
        preload = {key: claims for run in runs for key, claims in self._accounts(run).items()}
        system = _NO_DEFAULTS | {"limits": _ACCOUNT}
        preload[self.system.public] = self.operator.sign(self.system.public, "SYS", system, issued=self.issued)
        operator = {"type": "operator", "system_account": self.system.public}
        lines = "".join(f"  {key}: {claims}\n" for key, claims in preload.items())
        return (
            f"operator: {self.operator.sign(self.operator.public, 'relax', operator, issued=self.issued)}\n"
            f"system_account: {self.system.public}\n"
            f"max_control_line: {MAX_SIGN_IN}\n"
            "resolver: MEMORY\n"
            f"resolver_preload: {{\n{lines}}}\n"
        )

    def _accounts(self, run: RunUsers) -> dict[str, str]:
        """Signed claims of the accounts of a run by public key, that of its streams first."""
        # The server's monitoring reports accounts by the name in their claims and looks them up by key.
        owner = self.account_of(run.run).public
        limits = _ACCOUNT | _JETSTREAM | {"disk_storage": run.max_bytes}
        keys = {name: self.account_of(run.run, name).public for name in run.users}
        served = {subject: keys[name] for name, granted in run.users.items() for subject in granted.serves}
        # The operator, who is in this account, may send requests to actors.
        own = {"limits": limits, "exports": exports(run.users.values()), "imports": requests_to(served)}
        accounts = {owner: (owner, own)}
        for name, granted in run.users.items():
            limits = _ACCOUNT | {"conn": MAX_CONNECTIONS, "subs": MAX_SUBSCRIPTIONS, "leaf": 0}
            claims = {"limits": limits, "imports": imports(granted, owner, served), "exports": own_exports(granted)}
            accounts[keys[name]] = (f"{run.run}.{name}", claims)
        revoked = {"revocations": {"*": run.revoked}} if run.revoked else {}
        return {
            key: self.operator.sign(key, name, _NO_DEFAULTS | claims | revoked, issued=max(self.issued, run.revoked))
            for key, (name, claims) in accounts.items()
        }

    def credentials(
        self,
        name: str,
        permissions: Permissions,
        account: SigningKey,
        expires: float | None = None,
        *,
        issued: int | None = None,
        websocket: bool = False,
    ) -> str:
        """Return the content of a `.creds` file for a new user.

        Args:
            name: name of the user in its claims.
            permissions: what the user may publish and subscribe to.
            account: the user's account.
            expires: Unix time in seconds; None never expires.
            issued: Unix time in seconds, to compare with the run's revocation; now by default.
            websocket: whether the user may connect over WebSocket, as browsers do, besides plain NATS.
        """
        user = SigningKey.new(_USER_PREFIX)
        # NATS takes an empty allow list as "everything is allowed".
        pub, sub = (
            {"allow": list(allowed), "deny": list(denied)} if allowed else {"deny": [">"]}
            for allowed, denied in ((permissions.published, permissions.withheld), (permissions.subscribed, ()))
        )
        kinds = ["STANDARD", "WEBSOCKET"] if websocket else ["STANDARD"]
        own = {"type": "user", **_UNLIMITED, "pub": pub, "sub": sub, "allowed_connection_types": kinds}
        claims = account.sign(user.public, name, own, expires=expires, issued=issued)
        return (
            f"-----BEGIN NATS USER JWT-----\n{claims}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of a `.creds` file."""

    name: str
    """Name of the user."""
    inbox_prefix: str | None
    """Prefix of the inboxes that the user may subscribe to; None if unrestricted."""


def read_claims(path: Path) -> Claims:
    """Read the claims of a `.creds` file, unverified; raises AddressError for other files."""
    return _read(path)[0]


def sign_in(path: Path, nonce: str) -> tuple[Claims, dict[str, str]]:
    """Return the claims of a `.creds` file and the `CONNECT` fields that prove them."""
    claims, token, seed = _read(path)
    return claims, {"jwt": token, "sig": _base64(SigningKey(seed).sign_bytes(nonce.encode()))}


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a user, with the claims that the account of the run signed."""

    claims: str
    signature: str

    @classmethod
    def of(cls, data: bytes, path: Path) -> Signature:
        """Sign bytes with the key of a `.creds` file; raises AddressError for another file."""
        _, token, seed = _read(path)
        return cls(token, _base64(SigningKey(seed).sign_bytes(data)))

    def verify(self, data: bytes) -> tuple[str, str]:
        """Verify signature and claims; return the user's name and the account's public key.

        Raises:
            BrokerError: a signature does not match, or the claims cannot be read.
        """
        try:
            head, body, own = self.claims.split(".")
            claims = json.loads(_decoded(body))
            issuer, key, name = (str(claims[field]) for field in ("iss", "sub", "name"))
            _verify(issuer, f"{head}.{body}".encode(), _decoded(own))
            _verify(key, data, _decoded(self.signature))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            msg = f"the signature cannot be read: {type(error).__name__}: {error}"
            raise BrokerError(msg) from error
        return name, issuer


def _verify(key: str, data: bytes, signature: bytes) -> None:
    """Raise BrokerError unless the owner of an encoded public key has signed the data."""
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415 only needed to verify
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        # An encoded key is a prefix byte, the key and a checksum of 2 bytes.
        VerifyKey(base64.b32decode(key + "=" * (-len(key) % 8))[1:-2]).verify(data, signature)
    except BadSignatureError as error:
        msg = f"the signature by {key} does not match"
        raise BrokerError(msg) from error


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _read(path: Path) -> tuple[Claims, str, str]:
    """Return the claims of a `.creds` file, as read and as signed, and the seed."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CREDENTIALS).decode()
        token, seed = (
            text.split(f"-----BEGIN {name}-----", 1)[1].split()[0] for name in ("NATS USER JWT", "USER NKEY SEED")
        )
        claims = token.split(".")[1]
        body = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        allowed = body["nats"].get("sub", {}).get("allow", [])
        prefix = next((pattern.removesuffix(".>") for pattern in allowed if pattern.startswith("_INBOX")), None)
        return Claims(str(body["name"]), prefix), token, seed
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        msg = f"{path} is not a NATS .creds file ({type(error).__name__}: {error}); name one written by `relax keys`"
        raise AddressError(msg) from error


def _nkeys() -> Any:
    import nkeys  # noqa: PLC0415 only needed to sign

    return nkeys


def _encode_json(body: dict[str, Any]) -> str:
    return _base64(json.dumps(body, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
