"""The example `lora` in a short form: a base from examples, then an adapter, which PEFT loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
def test_adapter_of_a_base_from_examples_is_trained_evaluated_and_loaded_by_peft(make_run: Callable[..., Run]) -> None:
    whole = make_run("lora", *SHORT, config=EXAMPLE)
    whole.complete(500)
    base, run = (whole.cwd / "runs" / f"lora-{stage}" for stage in ("base", "adapter"))
    first, last = (read_evaluation(run / "evaluations" / f"{version}.jsonl") for version in (0, 6))
    assert figures_of(last)["held_out"].rows == 8
    assert first.fingerprint != last.fingerprint
    adapter = run / "model" / "adapter"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (run / "model" / "model.safetensors").exists()
    peft = pytest.importorskip("peft", reason="needs the extra parity")
    from transformers import AutoModelForCausalLM

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "model"), adapter)
    ups = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert len(ups) == 21  # seven layers in each of three
    assert all(parameter.abs().sum() > 0 for parameter in ups)
