"""Compare padded, packed and prefix-sharing micro-batches: CPU time of forward and backward, one thread, interleaved.

    python benchmarks/packing.py [--repeats 7] [--json]

All get the same sequences, the same limit of tokens per micro-batch and the same model. "Padded" is the input that a
transformers model takes unchanged: rows padded to the longest, sorted by length, logits of completions only. "Packed"
is `trainer.share_prefixes = false`, "shared" is the default. Tokens are those that linear layers compute in a step.
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
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from relax_actors.algorithms.vocabulary import score_tokens
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.forward import Forward


@dataclass(frozen=True)
class Case:
    """Sizes of a model, and the sequences of a step."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    budget: int
    samples: Sequence[TrainSample]

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
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return model


def long_tailed(median: float, sigma: float, most: int, count: int) -> list[int]:
    """Draw `count` log-normal lengths, at most `most`."""
    drawn = median * np.random.default_rng(0).lognormal(0, sigma, count)
    found: list[int] = np.clip(drawn.round(), 2, most).astype(np.int64).tolist()
    return found


def groups(vocabulary: int, prompt: int, lengths: Sequence[int], size: int = 8) -> list[TrainSample]:
    """Draw completions of these lengths; each `size` of them answer one prompt of `prompt` tokens."""
    source = np.random.default_rng(1)
    prompts = source.integers(0, vocabulary, (len(lengths), prompt), dtype=np.int32)
    completions = [source.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    return [
        TrainSample.of_completion(prompts[i // size], completion, row=i // size)
        for i, completion in enumerate(completions)
    ]


def branches(vocabulary: int, prompt: int, turns: int, answer: int, observation: int, size: int) -> list[TrainSample]:
    """Draw sessions whose client leaves out its last observation in each turn, so that every turn is a branch."""
    source = np.random.default_rng(1)
    start, found = source.integers(0, vocabulary, prompt, dtype=np.int32), []
    for _ in range(size):
        history = start
        for _ in range(turns):
            read = np.concatenate([history, source.integers(0, vocabulary, observation, dtype=np.int32)])
            said = source.integers(0, vocabulary, answer, dtype=np.int32)
            found.append(TrainSample.of_completion(read, said))
            history = np.concatenate([history, said])
    return found


CASES = (
    Case("64 of 32 tokens, prompts of 16", 128, 4, 103, 8192, groups(103, 16, [32] * 64)),
    Case("128 of 2 to 25, prompts of 6", 128, 3, 12, 2048, groups(12, 6, long_tailed(5, 0.7, 25, 128))),
    Case("64 of 2 to 300, prompts of 20", 128, 3, 4096, 4096, groups(4096, 20, long_tailed(40, 0.9, 300, 64))),
    Case("8 of 200, prompt of 2,000", 128, 4, 103, 8192, groups(103, 2000, [200] * 8)),
    Case("4 sessions of 8 branches", 128, 4, 103, 8192, branches(103, 200, 8, 60, 40, 4)),
)


def padded_step(model: PreTrainedModel, sequences: Sequence[TrainSample], budget: int) -> None:
    """Forward and backward of micro-batches with rows padded on the right."""
    lengths = [len(sample) for sample in sequences]
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
        (score_tokens(logits, tokens[:, -width:, None], 1.0).logprobs[..., 0] * mask[:, -width:]).sum().backward()


def packed_step(model: PreTrainedModel, sequences: Sequence[TrainSample], budget: int, forward: Forward) -> int:
    """Forward and backward as in the trainer; return the tokens computed."""
    tokens = 0
    for plan in forward.plan(sequences, budget):
        batch = forward.micro_batch(sequences, plan)
        forward.logprobs(model, batch).sum().backward()
        tokens += batch.tokens.numel()
    return tokens


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each kind, ratios of pairs, and tokens that a step computes."""
    forwards = {
        name: Forward(torch.device("cpu"), torch.float32, 1.0, share_prefixes=name == "shared")
        for name in ("packed", "shared")
    }
    padded, packed = case.model("sdpa"), forwards["packed"].prepare(case.model(None))
    times: dict[str, list[float]] = {"padded": [], "packed": [], "shared": []}
    tokens = {}
    for _ in range(repeats + 1):
        for name, seconds in times.items():
            began = time.process_time()
            if name == "padded":
                padded_step(padded, case.samples, case.budget)
            else:
                tokens[f"tokens, {name}"] = float(packed_step(packed, case.samples, case.budget, forwards[name]))
            seconds.append(time.process_time() - began)
    medians = {name: round(statistics.median(values[1:]), 4) for name, values in times.items()}
    ratios = {
        f"{one} / {other}": round(
            statistics.median(a / b for a, b in zip(times[one][1:], times[other][1:], strict=True)), 2
        )
        for one, other in (("padded", "packed"), ("packed", "shared"))
    }
    return medians | ratios | tokens


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="CPU seconds of forward and backward")
    figures = {case.name: measure(case, options.repeats) for case in CASES}
    for column in ("completions", *figures[CASES[0].name]):
        table.add_column(column)
    for name, found in figures.items():
        table.add_row(name, *(f"{value:g}" for value in found.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
