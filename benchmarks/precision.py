"""Compare log-probs of trainer and rollout, by the precision of both, of logits, and of the rollout's weights.

    python benchmarks/precision.py [--layers 6] [--hidden 256] [--vocabulary 8192] [--range 0.3] [--json]

A Qwen3 with random weights; the larger they are, the sharper its distributions. The rollout samples in a precision with
weights published in it; the torch engine scores the samples in the same precision, with its weights in float32.
The last lines have the rollout round the weights of its linear layers to fewer bits, as servers do with
`rollout.sglang.quantization = "fp8"`, which round the inputs of these layers, too; and to four bits, also where the
trainer trains for them ([trainer.fake_quant], for integers: float8 has other distances between its numbers).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from training_workload import DENSE

from relax_actors.config import validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import Generation, GenerationRequest, TrainSample
from relax_actors.engines.sglang.float8_blocks import dequantised, quantised
from relax_actors.engines.sglang.quantization import BLOCK
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.fake_quant import on_grid
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.weights import files as weights

ROWS, SAMPLES, PROMPT, LONGEST = 4, 4, 32, 48
GROUP = 32


class WideHead(TransformersEngine):
    """Computes logits in float32 from hidden states in half precision, as SGLang does with `--enable-fp32-lm-head`."""

    def _logits(self, tokens: Tensor, cache: Any, reading: Any) -> Tensor:
        hidden = self._model.base_model(
            input_ids=tokens,
            attention_mask=reading.mask,
            position_ids=reading.positions,
            past_key_values=cache,
        ).last_hidden_state[:, -1]
        weight: Tensor = self._model.lm_head.weight
        return hidden.float() @ weight.float().T


def requests(vocabulary: int) -> list[GenerationRequest]:
    """Draw prompts."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, vocabulary, PROMPT, dtype=np.int32) for _ in range(ROWS)]
    settings: dict[str, Any] = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "max_tokens": LONGEST}
    return [GenerationRequest(p, seed, stop_ids=frozenset(), **settings) for seed, p in enumerate(prompts)]


def round_inputs(engine: TransformersEngine) -> None:
    """Round the inputs of linear layers to float8, in groups of 128 neighbours of a token, as servers do."""

    def rounded_inputs(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (given,) = inputs
        size = min(BLOCK, given.shape[-1])
        groups = given.float().unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / torch.finfo(torch.float8_e4m3fn).max
        return (((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(given.dtype),)

    for name, module in engine.model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded_inputs)


def rounded(published: Path, kind: str) -> tuple[str, Path]:
    """Round the weights of linear layers in a file of published weights; return fingerprint and file."""
    found = weights.load([published])
    for name in (name for name in found if name.endswith("_proj.weight")):
        wide = found[name].float()
        found[name] = (dequantised(*quantised(wide)) if kind == "float8" else on_grid(wide, 4, GROUP)).to(
            found[name].dtype
        )
    path = published.with_name("rounded.safetensors")
    weights.save(found, path)
    return weights.fingerprint(found), path


def measure(
    folder: Path,
    shape: dict[str, Any],
    precision: str,
    *,
    fp32_lm_head: bool = False,
    rollout_precision: str = "",
    rollout_weights: str = "",
    trains_bits: bool = False,
) -> dict[str, float]:
    """Sample and score in one precision.

    Args:
        folder: of the run.
        shape: architecture.
        precision: of the trainer, and of the rollout if it has no own.
        fp32_lm_head: whether logits are in float32.
        rollout_precision: of the rollout.
        rollout_weights: "float8", then with its inputs, or "4 bits"; empty for the published weights.
        trains_bits: whether the trainer's weights have four bits.
    """
    tree = {
        "run": {"name": "benchmark", "folder": str(folder)},
        "model": {"architecture": shape, "tokenizer": {"alphabet": "01#"}, "fp32_lm_head": fp32_lm_head},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"precision": precision, "max_tokens_per_microbatch": 1024},
    }
    if trains_bits:
        tree["trainer"]["fake_quant"] = {"bits": 4, "group": GROUP}
    config = validate(tree, "benchmark")
    prepare(config, config.model_path)
    engine = TorchEngine(config)
    engine.initialise(1)
    published = folder / "published.safetensors"
    rollout = (WideHead if fp32_lm_head else TransformersEngine)(
        config.model_path, dtype=getattr(torch, rollout_precision or precision)
    )
    fingerprint = engine.publish(published)
    if rollout_weights:
        fingerprint, published = rounded(published, rollout_weights)
    if rollout_weights == "float8":
        round_inputs(rollout)
    rollout.load(0, fingerprint, [published])
    asked = requests(shape["vocab_size"])
    return distance(engine, asked, rollout.generate(asked, lambda: None))


def distance(
    trainer: TorchEngine, asked: Sequence[GenerationRequest], made: Sequence[Sequence[Generation]]
) -> dict[str, float]:
    """Return how far the log-probs of samples are from the trainer's, in nats."""
    pairs = [(request, sample) for request, group in zip(asked, made, strict=True) for sample in group]
    samples = [TrainSample.of_completion(r.tokens, s.tokens, logprobs=s.logprobs) for r, s in pairs]
    scored = trainer.score(samples, lambda: None)
    ours = np.concatenate([row[sample.loss_mask] for row, sample in zip(scored, samples, strict=True)])
    theirs = np.concatenate([sample.masked("logprobs") for sample in samples])
    delta = (ours - theirs).astype(np.float64)
    return {
        "abs_delta": float(np.abs(delta).mean()),
        "max_delta": float(np.abs(delta).max()),
        "k3": float((np.exp(delta) - 1 - delta).mean()),
        "logprob": float(theirs.mean()),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--range", type=float, default=0.3, help="standard deviation of the weights")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape = DENSE | {
        "hidden_size": chosen.hidden,
        "intermediate_size": 3 * chosen.hidden,
        "num_hidden_layers": chosen.layers,
        "vocab_size": chosen.vocabulary,
        "initializer_range": chosen.range,
        "max_position_embeddings": 128,
    }
    lines: dict[str, tuple[str, dict[str, Any]]] = {
        f"{precision}, logits in {'float32' if fp32_lm_head else precision}": (
            precision,
            {"fp32_lm_head": fp32_lm_head},
        )
        for precision in ("bfloat16", "float16")
        for fp32_lm_head in (False, True)
    }
    lines["float16, rollout in bfloat16"] = ("float16", {"rollout_precision": "bfloat16"})
    for kind in ("float8", "4 bits"):
        lines[f"bfloat16, rollout's weights in {kind}"] = ("bfloat16", {"rollout_weights": kind})
    lines["bfloat16, trained for 4 bits"] = ("bfloat16", {"rollout_weights": "4 bits", "trains_bits": True})
    figures = {}
    for name, (precision, settings) in lines.items():
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = measure(Path(folder), shape, precision, **settings)
    table = Table("", *next(iter(figures.values())), title="Log-probs of trainer and rollout")
    for name, found in figures.items():
        table.add_row(name, *(f"{value:.3g}" for value in found.values()))
    Console(stderr=chosen.json, width=110).print(table)
    if chosen.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
