"""The example `lora` in a short form: a base from examples, then an adapter, written as PEFT reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from relax_actors.evaluation.figures import figures_of
from relax_actors.evaluation.records import read_evaluation
from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora" / "lora.toml"
SHORT = (
    *("stages.base.run.steps=8", "stages.base.trainer.warmup_steps=4", "stages.base.eval.rows=8"),
    *("stages.adapter.run.steps=6", "stages.adapter.eval.rows=8", "stages.adapter.trainer.warmup_steps=2"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapter_of_a_base_from_examples_is_trained_evaluated_and_written(make_run: Callable[..., Run]) -> None:
    whole = make_run("lora", *SHORT, config=EXAMPLE)
    whole.complete(500)
    run = whole.cwd / "runs" / "lora-adapter"
    first, last = (read_evaluation(run / "evaluations" / f"{version}.jsonl") for version in (0, 6))
    assert figures_of(last)["held_out"].rows == 8
    assert first.fingerprint != last.fingerprint
    adapter = run / "model" / "adapter"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (run / "model" / "model.safetensors").exists()
    ups = [tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in name]
    assert len(ups) == 21  # seven layers in each of three
    assert all(tensor.any() for tensor in ups)
