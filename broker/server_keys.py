"""Credentials of the users of an embedded server, in the layout of `relax keys`.

<user>/nats.creds     credentials of a user
private/keys.json     keys that sign the credentials; the account of the streams is one of them
server/auth.conf      accounts of all users, without secrets
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.address import CREDENTIALS_FILE
from broker.credentials import OperatorKeys
from broker.files import make_private_folder, write_private
from broker.permissions import OPERATOR, Permissions, inbox_prefix
from broker.run_users import RunUsers


@dataclass(frozen=True, slots=True)
class Users:
    """Users of a run."""

    run: str
    granted: Mapping[str, Permissions]
    """Permissions by name. The operator is in the account of the streams, every other user in one of its own."""

    @classmethod
    def operator(cls, run: str) -> Users:
        """Return only an operator, who may do everything in the account of the streams.

        Its inbox is that of the operator of a run that is up: a client that signed in before may stay connected.
        """
        return cls(run, {OPERATOR: Permissions((">",), (f"{inbox_prefix(run, OPERATOR)}.>", ">"))})

    @property
    def others(self) -> dict[str, Permissions]:
        """Users with an account of their own: all but the operator."""
        return {user: granted for user, granted in self.granted.items() if user != OPERATOR}

    def write_credentials(
        self,
        folder: Path,
        authority: OperatorKeys,
        expires: float | None = None,
        *,
        issued: int | None = None,
        browsers: Collection[str] = (),
    ) -> None:
        """Write `<user>/nats.creds` of every user; `browsers` may connect over WebSocket, too."""
        for user, granted in self.granted.items():
            account = authority.account_of(self.run, "" if user == OPERATOR else user)
            name, may_browse = f"{self.run}.{user}", user in browsers
            text = authority.credentials(name, granted, account, expires, issued=issued, websocket=may_browse)
            write_private(folder / user / CREDENTIALS_FILE, text)


def secret_of(folder: Path) -> Path:
    """File with the keys that sign the credentials of a folder."""
    return folder / "private" / "keys.json"


def accounts_of(folder: Path) -> Path:
    """File with the accounts of a folder's users, for the configuration of the server."""
    return folder / "server" / "auth.conf"


def write_keys(folder: Path, users: Users, browsers: Collection[str] = ()) -> None:
    """Write new credentials and accounts; earlier credentials stay valid.

    `browsers` are the users that may connect over WebSocket, too.

    Raises:
        BrokerError: the signing keys cannot be read.
        UnsafePathError: another user could write to the folder.
    """
    for name in (".", "private", "server", *users.granted):
        make_private_folder(folder / name)
    path = secret_of(folder)
    if path.exists():
        authority = OperatorKeys.load(path, "start the run again from nothing with --fresh")
    else:
        authority = OperatorKeys.new()
        authority.save(path)
    users.write_credentials(folder, authority, browsers=browsers)
    write_private(accounts_of(folder), authority.server_config([RunUsers(users.run, users.others)]))
