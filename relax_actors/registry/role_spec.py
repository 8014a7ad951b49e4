"""What a run needs to know of a role besides its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """Columns, permissions and place of a role; the class attribute `spec` of a `Role`.

    For a pool role `reads`, `writes` and `kinds` follow from the class attributes of the same names and are not
    repeated here. A role of the user needs a spec only if it is a `StatefulRole` that writes more than its column
    `writes`: with credentials it may write only what its spec lists.
    `section`, `requires` and `start_order` apply to built-in roles; those of the user stand in [roles.<name>].
    """

    reads: tuple[str, ...] = ()
    """Columns that the role reads."""
    writes: tuple[str, ...] = ()
    """Columns that the role writes, `dropped` and `quarantined` included."""
    kinds: tuple[str, ...] = ("group",)
    """Kinds of rows that it writes: "group" for training rows, "eval" for held-out rows."""
    numbered: Mapping[str, type] = field(default_factory=dict)
    """Numbered cells that it writes: the dataclass of each kind, such as `{"audit": Audit}`; only of a `StatefulRole`,
    since such a cell has one owner. The stream of the table, permissions and the collector follow from it."""
    turns: bool = False
    """Whether it writes turn cells of the rows that it generates."""
    notes: tuple[str, ...] = ()
    """Keys of the run's bucket where it tells others how to reach it; each begins with `note.`."""
    serves: tuple[str, ...] = ()
    """Kinds of requests that it answers, such as "env"."""
    requests: tuple[str, ...] = ()
    """Kinds of requests that it sends, in runs with a role that answers them."""
    observes: tuple[str, ...] = ()
    """Roles of pools whose consumers it may look at: how many rows wait, and are in hand."""
    operates: bool = False
    """Whether it may request operations of the run; see `relax_actors.operations`."""
    removes: bool = False
    """Whether it may delete messages of the table and the bucket; only the trainer needs it."""
    single: bool = False
    """Whether a run has one actor of it, because it owns state or decides for the whole run; else it is a pool on any
    number of nodes."""
    device: bool = False
    """Whether it computes on an accelerator, and its engine takes seconds to import."""
    may_be_spot: bool = False
    """Whether its actors may be on nodes marked as spot, where they get rows only above a backlog; for pools."""
    section: str = "roles"
    """Configuration section with its `replicas` and `deadline`; "roles" for [roles.<name>]."""
    rows: Literal["", "sampled", "generated", "data"] = ""
    """Runs that have the role: with rows that a policy sampled; that a policy samples in this run; or whose samples are
    made from the data, recorded samples included. All runs if empty."""
    requires: str = ""
    """Optional configuration section without which a run does not have the role."""
    needs_weights: str = ""
    """Why it cannot be added to a run that has trained, which keeps its last weights only; empty if it can."""
    is_elsewhere: bool = False
    """Whether its actors belong on other nodes: `relax up` starts some only if `--roles` names it."""
    start_order: int = 20
    """Position in the start of a run: roles with quick imports first, so that they work while others load."""
