"""The nats-server that `relax up` starts, with the users of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from broker.address import Address
from broker.server import Server
from broker.server_keys import Users
from relax_actors.config import Config
from relax_actors.roles.permissions import permissions, users


@dataclass
class Embedded:
    """A server with the users of a run."""

    folder: Path
    config: Config
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        granted = {user: permissions(self.config, user) for user in users(self.config)}
        self.server = Server(self.folder, users=Users(self.config.run.name, granted))

    @property
    def keys(self) -> Path:
        return self.server.keys

    @property
    def url(self) -> str:
        return Address.load(self.folder / "address.json").url

    def start(self) -> None:
        self.server.start()

    def address(self, user: str) -> Address:
        return Address.load(self.folder / "address.json").for_user(user)

    def stop(self) -> None:
        self.server.stop()
