"""Size of an adapter's version, and CPU time of a training step beside PEFT, one thread, interleaved.

    python benchmarks/lora.py [--repeats 7] [--json]

The size is counted for Qwen2.5-0.5B, of which only shapes are built: bytes of a version, as a share of those of the
full set in the same precision. Both sides then train the same adapter of one small model on the same sequences:
forward, backward and AdamW. "peft" pads them to the longest and computes logits of completions only; "relax" is the
torch engine, with and without `trainer.share_prefixes`. The losses must agree.

The error of merging is that of `rollout.sglang.merge_adapter`: after 20 steps the trained adapter is added to the base
in each precision, once exactly and once rounded to the precision. Both sets compute log-probs in float32, so the
difference is that of the rounding alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from relax_actors.config import Config, validate
from relax_actors.config.lora import LoraSection
from relax_actors.data.adapter import DOWN, UP, AdapterForm, form_of
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.adapter import Adapter
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, copy_into, tensors_of

RANK = 16
MERGE_STEPS = 20
QWEN_HALF = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
ALPHABET = "0123456789>#"
SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def sizes() -> dict[str, float]:
    """Count the bytes of a version of Qwen2.5-0.5B in bfloat16, as a full set and as an adapter of rank 16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(QWEN_HALF)
    full = 2 * sum(tensor.numel() for tensor in tensors_of(model).values())
    adapter = Adapter(model, AdapterForm(RANK, 32.0, False, 0.0, "all-linear", ()), 16 * "00", 0)
    own = 2 * sum(tensor.numel() for tensor in adapter.tensors().values())
    return {"full_bytes": full, "adapter_bytes": own, "share": own / full}


def base_of(folder: Path) -> Path:
    """Write the small model with random weights; return its folder."""
    tree = {
        "run": {"name": "base", "folder": str(folder)},
        "model": {"architecture": SMALL, "tokenizer": {"alphabet": ALPHABET}},
        "data": {"kind": "python", "function": "nothing"},
    }
    config = validate(tree, "benchmark")
    prepare(config, config.model_path)
    save_file(tensors_of(build(config.model_path, seed=7)), config.model_path / "model.safetensors")
    return config.model_path


def config_of(folder: Path, base: Path, *, shares: bool) -> Config:
    """Configure a run that trains an adapter of the small model."""
    trainer = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 8192, "max_grad_norm": 1e9, "share_prefixes": shares}
    tree = {
        "run": {"name": "lora", "folder": str(folder), "seed": 5, "steps": 1000},
        "model": {"path": str(base)},
        "data": {"kind": "python", "function": "nothing"},
        "algorithm": {"name": "sft"},
        "trainer": trainer,
        "lora": {"rank": RANK},
    }
    return validate(tree, "benchmark")


def samples() -> list[TrainSample]:
    """Draw 8 rows of 4 completions of a prompt."""
    random = np.random.default_rng(1)
    found = []
    for row in range(8):
        prompt = random.integers(0, len(ALPHABET), 40).astype(np.int32)
        for sample in range(4):
            tokens = random.integers(0, len(ALPHABET), random.integers(10, 60)).astype(np.int32)
            ones = np.ones(len(tokens), np.float32)
            columns = {"advantages": ones, "logprobs": np.zeros_like(ones)}
            found.append(TrainSample.of_completion(prompt, tokens, **columns, row=row, sample=sample))
    return found


def relax_step(folder: Path, base: Path, batch: Sequence[TrainSample], *, shares: bool) -> Callable[[], float]:
    """Return a step of the torch engine, which returns its loss."""
    engine, step = TorchEngine(config_of(folder, base, shares=shares)), iter(range(1000))
    engine.initialise(5)
    engine.finish_warm_start()
    engine.export(folder / "model")
    return lambda: train(engine, batch, next(step), lambda: None).metrics["loss"]


def peft_step(base: Path, adapter: Path, batch: Sequence[TrainSample]) -> Callable[[], float]:
    """Return a step of PEFT's model with the same first adapter, which returns its loss."""
    from peft import PeftModel  # noqa: PLC0415 of the extra parity

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0, fused=True
    )
    longest = max(len(sample.token_ids) for sample in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, sample in enumerate(batch):
        tokens[i, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids)
        mask[i, : len(sample.token_ids)] = torch.from_numpy(sample.loss_mask)
    kept = longest - min(int(sample.loss_mask.argmax()) for sample in batch) + 1
    lengths = torch.tensor([len(sample.token_ids) for sample in batch])
    attention = torch.arange(longest) < lengths[:, None]

    def step() -> float:
        logits = model(input_ids=tokens, attention_mask=attention, logits_to_keep=kept).logits[:, :-1]
        targets, trained = tokens[:, -kept + 1 :], mask[:, -kept + 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = -logprobs[trained].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


@torch.no_grad()
def merging(folder: Path, base: Path, batch: Sequence[TrainSample]) -> dict[str, dict[str, float]]:
    """Measure the error of merging by precision.

    Returns:
        `lost`, the norm of the error of the weights as a share of the norm of s B A; `error`, the mean absolute
        difference of a token's log-prob; `effect`, that between the base and the base with the adapter.
    """
    engine = TorchEngine(config_of(folder, base, shares=True))
    engine.initialise(5)
    engine.finish_warm_start()
    with torch.enable_grad():
        for step in range(MERGE_STEPS):
            train(engine, batch, step, lambda: None)
    folder.mkdir()
    path = folder / "adapter.safetensors"
    engine.publish(path)
    published, scale = load_file(path), form_of(config_of(folder, base, shares=True).lora or LoraSection()).scale
    stored = {name: t for file in sorted(base.glob("*.safetensors")) for name, t in load_file(file).items()}
    added = {
        f"{name.removesuffix(DOWN)}.weight": scale * (published[name.removesuffix(DOWN) + UP] @ published[name])
        for name in published
        if name.endswith(DOWN)
    }
    norm = math.sqrt(sum(float(update.square().sum()) for update in added.values()))
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = {name: tensor.to(dtype).float() for name, tensor in stored.items()}
        exact = rounded | {name: rounded[name] + update for name, update in added.items()}
        merged = exact | {name: exact[name].to(dtype).float() for name in added}
        lost = math.sqrt(sum(float((merged[name] - exact[name]).square().sum()) for name in added)) / norm
        alone, beside, together = (logprobs(base, weights, batch) for weights in (rounded, exact, merged))
        error, effect = (float((other - beside).abs().mean()) for other in (together, alone))
        found[str(dtype).removeprefix("torch.")] = {"lost": lost, "error": error, "effect": effect}
    return found


def logprobs(base: Path, weights: dict[str, torch.Tensor], batch: Sequence[TrainSample]) -> torch.Tensor:
    """Return the log-probs of the trained tokens, in float32."""
    model = build(base)
    copy_into(model, weights, "benchmark")
    found = []
    for sample in batch:
        tokens = torch.from_numpy(sample.token_ids).long()
        scores = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(-1, tokens[1:, None])[:, 0][torch.from_numpy(sample.loss_mask)[1:]])
    return torch.cat(found)


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of a step by side.

    Raises:
        SystemExit: the losses of a step differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        losses = {}
        for name, step in steps.items():
            began = time.process_time()
            losses[name] = step()
            seconds[name].append(time.process_time() - began)
        if not np.allclose(list(losses.values()), next(iter(losses.values())), rtol=1e-4):
            sys.exit(f"the losses of a step differ: {losses}")
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch, found = samples(), sizes()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = base_of(folder)
        steps = {
            "relax": relax_step(folder / "shared", base, batch, shares=True),
            "relax, packed": relax_step(folder / "packed", base, batch, shares=False),
            "peft": peft_step(base, folder / "shared" / "model" / "adapter", batch),
        }
        seconds = measure(steps, arguments.repeats)
        errors = merging(folder / "merged", base, batch)
    if arguments.json:
        sys.stdout.write(json.dumps(found | {"seconds": seconds, "merging": errors}) + "\n")
        return 0
    console = Console()
    full, own = found["full_bytes"] / 1e6, found["adapter_bytes"] / 1e6
    console.print(
        f"a version of Qwen2.5-0.5B, bfloat16: {full:.0f} MB; rank {RANK}: {own:.1f} MB, {found['share']:.2%}"
    )
    table = Table("step", "CPU s", "peft takes")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}", f"{seconds['peft'] / value:.2f}x")
    console.print(table)
    table = Table("merged in", "update lost", "error of a log-prob", "effect of the adapter on it")
    for name, figures in errors.items():
        table.add_row(name, f"{figures['lost']:.2%}", f"{figures['error']:.1e}", f"{figures['effect']:.1e}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
