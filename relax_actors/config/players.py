"""Keys of the sections [environment] and [agent] that name the players of a sample."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from relax_actors.config.sections import PoolSection
from relax_actors.messages.samples import PLAYER_NAME

PlayerName = Annotated[str, Field(pattern=f"^{PLAYER_NAME.pattern}$")]
MAX_PLAYERS = 64


class PlayersSection(PoolSection):
    """Section whose samples may have players.

    Attributes:
        title: name of the section, for errors.
    """

    title: ClassVar[str]

    players: Annotated[tuple[PlayerName, ...], Field(max_length=MAX_PLAYERS)] = ()
    """Players of a sample, all of which the model plays, each with a conversation and a reward of its own. In an
    environment the first one begins, and `Step(player=...)` names who reads the observation and acts next; an agent
    names the player of each request in the header `X-Relax-Player`. Without players, the model is one side."""
    trained: tuple[PlayerName, ...] | None = None
    """Players whose turns are trained, and whose rewards add up to that of the sample; all if not set."""

    @model_validator(mode="after")
    def _check_players(self) -> Self:
        for setting, names in (("players", self.players), ("trained", self.trained or ())):
            if len(set(names)) < len(names):
                msg = f"{self.title}.{setting} names a player twice: {', '.join(names)}"
                raise ValueError(msg)
        if unknown := [name for name in self.trained or () if name not in self.players]:
            players = f"players are {', '.join(self.players)}" if self.players else "players is not set"
            msg = f"{self.title}.trained names {unknown[0]!r}, but {self.title}.{players}"
            raise ValueError(msg)
        if self.trained is not None and not self.trained:
            msg = f"{self.title}.trained = [] trains nothing; name a player, or leave it out to train all"
            raise ValueError(msg)
        return self

    @property
    def trained_players(self) -> tuple[str, ...]:
        """Players whose turns are trained; empty without players."""
        return self.players if self.trained is None else self.trained
