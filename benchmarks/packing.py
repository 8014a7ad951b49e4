"""Compare packed and padded micro-batches: CPU time of forward and backward, one thread, interleaved.

    python benchmarks/packing.py [--repeats 7] [--json]

Both get the same sequences, the same limit of tokens per micro-batch and the same model. "Padded" is the input that a
transformers model takes unchanged: rows padded to the longest, sorted by length, logits of completions only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from relax_actors.algorithms.losses import token_logprobs
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.protocols.samples import lengths_of
from relax_actors.engines.torch.forward import Forward


@dataclass(frozen=True)
class Case:
    """Sizes of a model, and lengths of completions."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    prompt: int
    lengths: NDArray[np.int64]
    budget: int

    def model(self, attention: str | None) -> PreTrainedModel:
        """Build a Qwen3 of these sizes with random weights."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=11 * self.hidden // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.hidden // 4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return model


def long_tailed(median: float, sigma: float, most: int, count: int) -> NDArray[np.int64]:
    """Draw `count` log-normal lengths, at most `most`."""
    drawn = median * np.random.default_rng(0).lognormal(0, sigma, count)
    return np.clip(drawn.round(), 2, most).astype(np.int64)


CASES = (
    Case("all of 32 tokens", 128, 4, 103, 16, np.full(64, 32), 8192),
    Case("long tail, 2 to 25 tokens", 128, 3, 12, 6, long_tailed(5, 0.7, 25, 128), 2048),
    Case("long tail, 2 to 300 tokens", 128, 3, 4096, 20, long_tailed(40, 0.9, 300, 64), 4096),
)


def padded_step(model: PreTrainedModel, sequences: Sequence[TrainSample], budget: int) -> None:
    """Forward and backward of micro-batches with rows padded on the right."""
    lengths = lengths_of(sequences)
    order = sorted(range(len(sequences)), key=lambda i: -lengths[i])
    parts: list[list[int]] = []
    for i in order:
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    for part in parts:
        width = max(sequences[i].trained for i in part)
        prompt = len(sequences[part[0]]) - sequences[part[0]].trained
        tokens = torch.zeros(len(part), prompt + width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, i in enumerate(part):
            tokens[row, : lengths[i]] = torch.from_numpy(sequences[i].token_ids.astype(np.int64))
            mask[row, : lengths[i]] = 1
        logits = model(tokens, attention_mask=mask, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
        (token_logprobs(logits, tokens[:, -width:], 1.0) * mask[:, -width:]).sum().backward()


def packed_step(model: PreTrainedModel, sequences: Sequence[TrainSample], budget: int, forward: Forward) -> None:
    """Forward and backward as in the trainer."""
    for part in micro_batches(lengths_of(sequences), max_tokens=budget):
        forward.logprobs(model, forward.micro_batch(sequences, part)).sum().backward()


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Median CPU seconds of both, and their ratio."""
    source, forward = np.random.default_rng(1), Forward(torch.device("cpu"), torch.float32, 1.0)
    prompts = [source.integers(0, case.vocabulary, case.prompt, dtype=np.int32) for _ in case.lengths]
    completions = [source.integers(0, case.vocabulary, n, dtype=np.int32) for n in case.lengths]
    sequences = [TrainSample.of_completion(p, c) for p, c in zip(prompts, completions, strict=True)]
    padded, packed = case.model("sdpa"), forward.prepare(case.model(None))
    times: dict[str, list[float]] = {"padded": [], "packed": []}
    for _ in range(repeats + 1):
        began = time.process_time()
        padded_step(padded, sequences, case.budget)
        middle = time.process_time()
        packed_step(packed, sequences, case.budget, forward)
        times["padded"].append(middle - began)
        times["packed"].append(time.process_time() - middle)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {name: round(seconds, 4) for name, seconds in medians.items()} | {
        "ratio": round(medians["padded"] / medians["packed"], 2)
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="CPU seconds of forward and backward")
    for column in ("completions", "padded", "packed", "ratio"):
        table.add_column(column)
    figures = {case.name: measure(case, options.repeats) for case in CASES}
    for name, found in figures.items():
        table.add_row(name, *(str(value) for value in found.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
