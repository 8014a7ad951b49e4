"""Requests to actors that host a trainer's ranks on other nodes; not stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInvitation:
    """Ask whether an actor would join a group of ranks, or, with a port, tell it to join.

    Attributes:
        group: id of the group, new with every try, for logs.
        incarnation: of the actor that gathers the group; a lower one than before is refused.
        platform: code and libraries that the ranks compute with, and whether on GPUs.
        settings: digest of the settings that all ranks must share.
        rank: number of the rank.
        host: address on which the gathering actor waits for the rank.
        port: its port; 0 for a question.
        token: what the rank must send first to be let in.
    """

    group: str
    incarnation: int
    platform: str
    settings: str
    rank: int = -1
    host: str = ""
    port: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Answer of an actor that hosts a rank.

    Attributes:
        host: address by which its machine reaches the broker.
        problem: why it does not join; empty if it does.
    """

    host: str
    problem: str = ""
