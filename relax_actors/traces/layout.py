"""Turns of a sample as sequences, for formats that list turns with contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_actors.traces import fields
from relax_actors.traces.model import Array, Trace, TraceError
from relax_actors.traces.turns import Turn, turns_of

LAYOUT = "layout"
"""Name of the layout among the facts of a trace."""


def turns_and_layout(trace: Trace) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Return all turns, and of each sequence their number and the tokens behind."""
    turns = [turns_of(sequence) for sequence in trace.sequences]
    layout = [
        {"turns": len(own), "tail": each.token_ids[len(own[-1].whole) if own else 0 :].tolist()}
        for own, each in zip(turns, trace.sequences, strict=True)
    ]
    return [turn for own in turns for turn in own], layout


def laid_out(layout: object, turns: Sequence[Turn], origin: str) -> list[tuple[Array, Array]]:
    """Return each sequence's tokens and log-probs, `[len]`, by the recorded layout.

    Raises:
        TraceError: the turns are not those of the layout, or a turn does not continue the one before.
    """
    left, sequences = list(turns), []
    for own in layout if isinstance(layout, list) else []:
        count = own["turns"] if isinstance(own, dict) and type(own.get("turns")) is int else 0
        chain, left = left[:count], left[count:]
        ids = fields.token_ids(own, "tail", origin)
        if chain:
            ids = np.concatenate([chain[-1].whole, ids])
        logprobs = np.zeros(len(ids), np.float32)
        for turn in chain:
            if not np.array_equal(ids[: len(turn.whole)], turn.whole):
                msg = (
                    f"{turn.place}: its tokens are not the beginning of the next turn's prompt; export the trace again"
                )
                raise TraceError(msg)
            logprobs[len(turn.context) : len(turn.whole)] = turn.logprobs
        sequences.append((ids, logprobs))
    if left or not sequences:
        msg = f"{origin}: it has {len(turns)} turns, and its masks are for others; export the trace again"
        raise TraceError(msg)
    return sequences
