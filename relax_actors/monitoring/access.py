"""Access of a command on this machine to the broker of a run started elsewhere.

Such a run records a host name of its own network and a folder of its own containers.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import Address, address_of
from broker.permissions import OBSERVER, OPERATOR
from relax_actors.config.saved import SavedSettings
from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder

_SERVICES = {OPERATOR: "prompts", OBSERVER: "monitor"}
"""Service of docker-compose.yml that has the credentials of a user."""


@dataclass(frozen=True, slots=True)
class Access:
    """Options of a command that replace what the run recorded.

    Attributes:
        broker: address of the broker, `nats://host:port`.
        credentials: folder written by `relax keys`, or a .creds file.
    """

    broker: str | None = None
    credentials: Path | None = None


def address_for(folder: RunFolder, settings: SavedSettings, user: str, access: Access) -> Address:
    """Return the address of a run's broker as this machine reaches it.

    `broker.published` replaces a host name that is unknown on this machine, for a run with credentials only: these
    prove a key without sending it, so another server at that address learns no secret, and `Connection` refuses a
    server that asks for none.

    Raises:
        ConfigError: the broker's name or its credentials are unknown on this machine.
        BrokerError: the run has no recorded address, or `access.broker` is no address.
    """
    address, name = Address.load(folder.address), settings.run.name
    if access.broker is not None:
        address = replace(address_of(access.broker), credentials=address.credentials, ca=address.ca)
    elif settings.broker.url is not None and (unknown := unknown_hosts(address.url)):
        if settings.broker.published is None or address.credentials is None:
            msg = (
                f"broker {address.url} of run {name}: host name {unknown!r} is unknown on this machine; give "
                "the broker's address from here, e.g. --broker nats://127.0.0.1:4222 for a port that is published here"
            )
            raise ConfigError(msg)
        address = replace(address, url=settings.broker.published)
    if access.credentials is not None:
        address = replace(address, credentials=str(access.credentials.resolve()))
    if address.credentials is not None and not Path(address.credentials).exists():
        if settings.broker.url is None and access.credentials is None:
            msg = f"run {name} has lost {address.credentials}, the credentials of its broker; restore the folder"
            raise ConfigError(msg)
        msg = (
            f"run {name} has its credentials in {address.credentials}, which does not exist on this machine; "
            f"copy those of user {user!r} here and pass them with --credentials. With docker compose: "
            f"docker compose cp {_SERVICES[user]}:/keys/{user} keys, then --credentials keys"
        )
        raise ConfigError(msg)
    return address.for_user(user)


def unknown_hosts(url: str) -> str:
    """Return a broker's host names if this machine knows none, else an empty string."""
    hosts = [urlsplit(server).hostname or "" for server in url.split(",")]
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            continue
        return ""
    return ", ".join(hosts)
