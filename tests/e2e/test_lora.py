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
    *("stages.base.run.steps=30", "stages.base.trainer.warmup_steps=5", "stages.base.eval.rows=8"),
    *("stages.adapter.run.steps=40", "stages.adapter.eval.rows=128", "stages.adapter.eval.every=40"),
    "stages.adapter.trainer.warmup_steps=5",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapter_of_a_base_from_examples_learns_and_is_loaded_by_peft(make_run: Callable[..., Run]) -> None:
    whole = make_run("lora", *SHORT, config=EXAMPLE)
    whole.complete(500)
    base, run = (whole.cwd / "runs" / f"lora-{stage}" for stage in ("base", "adapter"))
    shares = []
    for version in (0, 40):
        evaluated = read_evaluation(run / "evaluations" / f"{version}.jsonl")
        accuracy = figures_of(evaluated)["held_out"].accuracy
        assert accuracy is not None
        shares.append(accuracy.value)
    assert shares[1] > shares[0] + 0.05
    adapter = run / "model" / "adapter"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (run / "model" / "model.safetensors").exists()
    peft = pytest.importorskip("peft", reason="needs the extra parity")
    from transformers import AutoModelForCausalLM

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "model"), adapter)
    assert sum("lora_B" in name for name, _ in model.named_parameters()) == 21
