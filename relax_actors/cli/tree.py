"""`relax tree`: the supervision tree of a run."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName

WIDTH = 250
"""Columns where output is no terminal, so that no line is cut."""


def tree(run: RunName, json: AsJson = False, broker: Broker = None, credentials: Credentials = None) -> None:
    """Show the supervision tree: the state of each actor, its restarts, and what it does."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.screen import Screen
    from relax_actors.monitoring.supervision_view import read_supervision, supervision_tree

    with connected(run, Access(broker, credentials)) as at:
        seen = read_supervision(at)
    if json:
        sys.stdout.write(json_module.dumps(asdict(seen)) + "\n")
    else:
        Screen(width=None if sys.stdout.isatty() else WIDTH).print(supervision_tree(seen))
