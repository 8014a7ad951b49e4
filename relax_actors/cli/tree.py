"""`relax tree`: the supervision tree of a run."""

from __future__ import annotations

import sys

from relax_actors.cli.options import Broker, Credentials, RunName

WIDTH = 250
"""Columns where output is no terminal, so that no line is cut."""


def tree(run: RunName, broker: Broker = None, credentials: Credentials = None) -> None:
    """Show the supervision tree: the state of each actor, its restarts, and what it does."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.screen import Screen
    from relax_actors.monitoring.supervision_view import supervision_tree

    with connected(run, Access(broker, credentials)) as at:
        shown = supervision_tree(at)
    Screen(width=None if sys.stdout.isatty() else WIDTH).print(shown)
