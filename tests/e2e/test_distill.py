"""The examples of distillation, in a short form: a model that another run trained teaches a smaller one, and itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.running import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("run.steps=3", "trainer.prompts_per_step=4", "eval.rows=8", "eval.every=0")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trained_model_teaches_a_smaller_one(tmp_path: Path) -> None:
    trained = Run(tmp_path, "demo", [*SHORT, "trainer.warm_start.steps=2"], config=EXAMPLES / "demo" / "demo.toml")
    trained.complete()
    teacher = f"roles.teacher.model={trained.folder.model}"
    advantage = ('algorithm.distil={place="advantage"}',)
    prints = set()
    for name, settings in (("advantage", advantage), ("loss", ())):
        run = Run(tmp_path, name, [*SHORT, teacher, *settings], config=EXAMPLES / "distill" / "distill.toml")
        result = run.complete()
        assert (result["steps"], result["trained"], result["quarantined"]) == (3, 12, 0)
        prints.add(result["weights_fingerprint"])
        steps = story_of(run).steps()
        # Two models with random or hardly trained weights differ in what they expect.
        assert all(step["teacher_kl"] != 0 for step in steps)
        assert [("distil" in step) for step in steps] == [name == "loss"] * 3
    assert len(prints) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_model_learns_without_the_hint_what_it_does_with_it(tmp_path: Path) -> None:
    settings = ("run.steps=1", "trainer.warm_start.steps=400", "eval.every=0")
    sorts = Run(tmp_path, "demo", list(settings), config=EXAMPLES / "demo" / "demo.toml")
    assert sorts.complete()["eval_last"] >= 0.9
    paths = [f"{key}={sorts.folder.model}" for key in ("model.path", "roles.teacher.model")]
    run = Run(tmp_path, "hint", ["run.steps=150", *paths], config=EXAMPLES / "distill" / "hint.toml")
    result = run.complete(400)
    assert (result["trained"], result["quarantined"]) == (150 * 32, 0)
    assert result["eval_first"] <= 0.05
    assert result["eval_last"] >= 0.4
