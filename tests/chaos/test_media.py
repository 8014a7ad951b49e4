"""Kills of a run that looks at pictures: the same weights at the end, and no file of a medium left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.equivalence import compare

KILLS = 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "squares"])
def test_killed_run_with_images_ends_with_the_same_weights_and_leaves_no_media(tmp_path: Path, kind: str) -> None:
    text, tally, result, story = compare(tmp_path, KILLS, seed=2, algorithm=kind)
    assert result["alone"] == result["weights_fingerprint"], text
    assert result["admitted"] == result["trained"]
    assert tally.by_victim["media.0"] > 0
    assert story.of("replay_diverged") == []
    store = tmp_path / "runs" / "killed" / "store"
    assert [path.name for path in (store / "media").iterdir() if path.stat().st_nlink == 1] == []
