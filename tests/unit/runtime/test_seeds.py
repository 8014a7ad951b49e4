"""Seeds of a run."""

from __future__ import annotations

from relax_actors.runtime.seeds import derive_seed


def test_seeds_have_63_bits_and_depend_on_every_part() -> None:
    assert derive_seed(1, "row", 2, 3) == derive_seed(1, "row", 2, 3)
    seeds = {
        derive_seed(run, kind, step, i) for run in range(4) for kind in "ab" for step in range(20) for i in range(20)
    }
    assert len(seeds) == 4 * 2 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "row", 12, 3) != derive_seed(1, "row", 1, 23)


def test_seeds_do_not_change_between_releases() -> None:
    assert derive_seed(0, "row", 0, 0) == 8737435638203586162
