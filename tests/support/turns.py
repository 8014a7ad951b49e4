"""Turns and ends of episodes as the cells of a row hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_actors.messages import SessionLog, SessionState, SessionTurn
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.session_log import restore


def log_of(written: Iterable[SessionTurn | SessionState]) -> SessionLog:
    """Return a cell with turns and states."""
    both = list(written)
    return SessionLog(
        [one for one in both if isinstance(one, SessionTurn)], [one for one in both if isinstance(one, SessionState)]
    )


def repeat_turns(episodes: Sequence[Episode], written: Iterable[SessionTurn | SessionState]) -> int:
    """Bring the episodes of a row to where turns and states end; return the number of turns that were taken."""
    return restore(episodes, [log_of([one]) for one in written])
