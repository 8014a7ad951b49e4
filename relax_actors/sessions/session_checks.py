"""Checks of what agents send to a session."""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.messages.generate import GenerateCall, Refusal, SessionCall
from relax_actors.sessions.service import Refused
from relax_actors.sessions.session_book import Session


def check_current(session: Session, call: GenerateCall | SessionCall) -> None:
    """Check that a session is still its agent's after a wait; raises Refused."""
    if session.id != call.session:
        raise Refused(Refusal.ENDED, over(call.session, "another agent has its sample"))
    if session.state is not None:
        raise Refused(Refusal.ENDED, over(call.session, f"it ended with reason '{session.state.reason}'"))


def over(name: str, why: str) -> str:
    """Return why a session takes no request."""
    return f"session {name[:128]!r} is over: {why}"


def check_player(call: GenerateCall, players: Sequence[str]) -> None:
    """Check that a request names one of the players, if any; raises Refused."""
    if call.player in (players or ("",)):
        return
    if not players:
        detail = f"the request names the player {call.player[:64]!r}, but agent.players is not set; leave it out"
    else:
        named = f"names the player {call.player[:64]!r}" if call.player else "names no player"
        detail = f"the request {named}; send one of agent.players ({', '.join(players)}) in the header X-Relax-Player"
    raise Refused(Refusal.INVALID, detail)


def check_branches(call: GenerateCall, branches: str) -> None:
    """Check that a request for several answers suits `agent.branches`; raises Refused."""
    if call.n > 1 and branches == "last":
        detail = (
            f'n = {call.n} needs agent.branches = "all": with "last" the branch with the last answer alone is trained, '
            "and several answers to one request have no last one; send n = 1"
        )
        raise Refused(Refusal.INVALID, detail)


def check_rewards(call: SessionCall, players: Sequence[str]) -> None:
    """Check that an agent rewards the players by name, if any; raises Refused."""
    if unknown := [name for name in call.rewards if name not in players]:
        known = f"agent.players are {', '.join(players)}" if players else "agent.players is not set; send `reward`"
        raise Refused(Refusal.INVALID, f"`rewards` names the player {unknown[0][:64]!r}, but {known}")
    if players and call.reward is not None:
        example = ", ".join(f'"{name}": <number>' for name in players[:4])
        detail = f'agent.players have a reward each; send {{"rewards": {{{example}}}}} in place of `reward`'
        raise Refused(Refusal.INVALID, detail)
