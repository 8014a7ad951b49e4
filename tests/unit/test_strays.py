"""Which cells the trainer removes, by the cells of the table and the extent of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.subjects import CellId
from relax_actors.operations.plan import MOST_NODES, SPAN
from relax_actors.training.ledger import STRAY_REFILLS
from relax_actors.training.strays import (
    FIRST_COLUMNS,
    MAX_KEPT_WITHOUT_PROMPT,
    Extent,
    Removal,
    allowed_bytes,
    removal,
)

EXTENT = Extent(
    steps=20,
    rows=4,
    lead=1,
    version=5,
    floor=3,
    eval_rows=6,
    evaluated=lambda version: version % 5 == 0,
    results=frozenset(),
)
COLUMNS = ("prompt", "trajectory", "reward")


def cells(*names: str) -> list[CellId]:
    """Parse `group.<step>.<index>.<column>`."""
    found = []
    for name in names:
        kind, step, index, field = name.split(".", 3)
        found.append(CellId(kind, int(step), int(index), field))
    return found


def removed(*names: str, extent: Extent = EXTENT) -> Removal:
    found = cells(*names)
    return removal(found, [cell for cell in found if cell.field in FIRST_COLUMNS], extent)


def test_cells_of_admitted_rows_stay() -> None:
    names = [f"group.{step}.{index}" for step in (3, 6) for index in (0, 3, 4)]
    columns = ("prompt", "trajectory", "dropped", "custom")
    assert removed(*(f"{name}.{column}" for name in names for column in columns)) == Removal((), (), ())


@pytest.mark.parametrize("last", ["group.7.0.quarantined", "group.7.4.prompt", "group.6.255.dropped"])
def test_strays_that_ledgers_store_stay(last: str) -> None:
    assert removed(last).filters == ()


@pytest.mark.parametrize(
    ("stray", "wanted"),
    [
        ("group.8.0.prompt", "group.8.>"),  # the lead reaches to step 6, and step 7 is due next
        ("group.99999999.17.trajectory", "group.99999999.>"),
        ("group.6.0.trajectory", "group.6.0.trajectory"),  # without a prompt
        ("group.7.1.readmitted", "group.7.1.readmitted"),
        (f"group.6.{4 * STRAY_REFILLS}.quarantined", f"group.6.{4 * STRAY_REFILLS}.>"),
        ("eval.5.6.prompt", "eval.5.6.>"),
        ("eval.4.0.prompt", "eval.4.>"),  # a version that is not evaluated
        ("eval.10.0.prompt", "eval.10.>"),  # a version that does not exist yet
        ("eval.5.0.reward", "eval.5.0.reward"),
    ],
)
def test_strays_go(stray: str, wanted: str) -> None:
    found = removed(stray)
    assert (found.filters, found.strays) == ((wanted,), tuple(cells(stray)))


def test_no_step_beyond_the_last_one_is_possible() -> None:
    assert removed("group.20.0.prompt", extent=replace(EXTENT, version=19)).filters == ("group.20.>",)
    assert removed("group.19.0.prompt", extent=replace(EXTENT, version=19)).filters == ()


def test_rows_that_may_have_a_prompt_that_was_not_listed_stay() -> None:
    """With more prompts than are listed at once, only steps that are not due are removed."""
    found = removal(cells("group.6.0.trajectory", "group.2.0.prompt", "group.8.0.prompt"), None, EXTENT)
    assert found.filters == ("group.8.>",)


def test_rows_below_the_floor_go_except_quarantined_ones() -> None:
    found = removed(
        "group.1.0.prompt", "group.1.0.trajectory", "group.2.0.prompt", "group.2.0.quarantined", "group.2.0.reward",
        "group.2.1.prompt", "group.2.1.advantage", "group.2.0.requeued", "group.0.1.quarantined",
    )  # fmt: skip
    assert set(found.filters) == {"group.1.>", "group.2.0.reward", "group.2.1.prompt", "group.2.1.advantage"}
    assert found.strays == ()


def test_many_steps_below_the_floor_go_in_bulk() -> None:
    """By the indices of their rows, as these are fewer than the steps."""
    extent = replace(EXTENT, version=50, floor=40, steps=99)
    names = [f"group.{step}.{index}.{column}" for step in range(41) for index in (0, 1, 5) for column in COLUMNS]
    found = removed(*names, extent=extent)
    assert found.bulk == ("group.*.0.>", "group.*.1.>", "group.*.5.>")
    assert found.filters == tuple(f"group.{step}.>" for step in range(40))
    assert removed(*(name for name in names if name.startswith("group.1")), extent=extent).bulk != ()
    assert removed(*(name for name in names if name.startswith("group.2.")), extent=extent).bulk == ()


def test_rows_that_are_kept_do_not_go_in_bulk() -> None:
    extent = replace(EXTENT, version=50, floor=40, steps=99)
    names = [f"group.{step}.{index}.{column}" for step in range(41) for index in (0, 1, 5) for column in COLUMNS]
    found = removed(*names, "group.7.1.quarantined", "group.7.1.requeued", "group.45.5.quarantined", extent=extent)
    assert found.bulk == ("group.*.0.>", "group.*.1.reward", "group.*.1.trajectory", "group.*.5.>")
    assert "group.7.>" not in found.filters
    assert not {"group.7.1.prompt", "group.7.1.quarantined", "group.7.1.requeued"} & set(found.filters)


def test_a_kept_row_that_was_not_listed_among_all_cells_does_not_go_in_bulk() -> None:
    extent = replace(EXTENT, version=50, floor=40, steps=99)
    listed = cells(*(f"group.{step}.0.{column}" for step in range(41) for column in COLUMNS))
    first = [*(cell for cell in listed if cell.field in FIRST_COLUMNS), *cells("group.7.0.quarantined")]
    assert removal(listed, first, extent).bulk == ("group.*.0.reward", "group.*.0.trajectory")


def test_many_quarantined_rows_without_a_prompt_are_strays_below_the_floor() -> None:
    flood = [f"group.2.{index}.quarantined" for index in range(MAX_KEPT_WITHOUT_PROMPT)] + ["group.0.0.quarantined"]
    assert removed(*flood[1:]).filters == ()
    found = removed(*flood, "group.2.0.prompt", "group.2.1.prompt", "group.1.0.quarantined", "group.1.0.prompt")
    assert set(found.filters) == set()
    found = removed(*flood, "group.1.0.quarantined", "group.1.0.prompt")
    assert found.filters == ("group.0.>", "group.2.>")


def test_rows_of_absurd_indices_are_strays_below_the_floor() -> None:
    last = 4 * STRAY_REFILLS
    kept = ["group.2.9999.quarantined", "group.2.9999.prompt", f"group.2.{last - 1}.quarantined"]
    assert removed(*kept, f"group.2.{last}.quarantined").filters == (f"group.2.{last}.quarantined",)


def test_evaluations_with_a_result_go_except_the_last() -> None:
    names = [
        f"eval.{version}.{index}.{field}" for version in (0, 5) for index in (0, 5) for field in ("prompt", "reward")
    ]
    extent = replace(EXTENT, results=frozenset({0, 5}))
    found = removed(*names, extent=extent)
    assert (found.filters, found.finished, found.strays) == (("eval.0.>",), ("eval.0",), ())
    assert removed(*names, extent=replace(EXTENT, results=frozenset({0}))).filters == ()


KEYS = (
    "run",
    "note.address",
    "lease.node.0",
    "lease.owner.trainer",
    "lease.rollout.8191",
    f"lease.rollout.{MOST_NODES * SPAN - 1}",
    "incarnation.rollout.3",
    "incarnation.rollout.*",  # its purge would remove all incarnations of the role
    "failure.rollout.group.3.17",
)
FOREIGN_KEYS = (
    "lease.node.*",
    "lease.owner.other",
    "lease.other.0",
    "lease.rollout.10000000",
    "failure.rollout.group.3",
    "failure.rollout.>",
    "other.rollout.3",
)


def test_keys_that_no_process_of_the_run_has_are_removed() -> None:
    roles = ("rollout", "trainer")
    assert [key for key in (*KEYS, *FOREIGN_KEYS) if allowed_bytes(key, roles) > 0] == [*KEYS]


def test_turn_cells_go_with_their_row() -> None:
    names = ("group.4.0.prompt", "group.4.0.turns.0.0", "group.4.1.turns.0.0", "group.9.0.turns.1.7")
    assert removed(*names).filters == ("group.9.>", "group.4.1.turns.0.0")
    kept = removed("group.2.0.prompt", "group.2.0.quarantined", "group.2.0.turns.0.0", "group.2.1.turns.0.3")
    assert kept.filters == ("group.2.0.turns.0.0", "group.2.1.turns.0.3")
