"""Compare the sampling loop of the transformers engine with `generate` on the same small model, one thread.

Both generate 16 prompts x 8 samples; `generate` keeps its logits, because the log-probs of sampled tokens are needed.

    python benchmarks/generation.py [--tokens 16] [--repeats 15] [--json]
    python benchmarks/generation.py --prompts 100 200 --heads 14 --tokens 64 --repeats 3   # padded, 7 heads a key head
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config

from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.engines.transformers.lockstep_batch import padded
from relax_actors.weights import files as weights

PROMPTS, SAMPLES, PAD = 16, 8, 127


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def write_config(folder: Path, heads: int) -> None:
    """Write the config.json of a small Qwen3 with two key heads."""
    Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=126,
        bos_token_id=None,
    ).save_pretrained(folder)


def prompts_of(least: int, most: int) -> list[NDArray[np.int32]]:
    """Draw the prompts; the first has the largest length."""
    random = np.random.default_rng(0)
    lengths = [most, *random.integers(least, most + 1, PROMPTS - 1)]
    return [random.integers(0, 100, length).astype(np.int32) for length in lengths]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompts", type=int, nargs=2, default=(12, 12), help="least and most tokens of a prompt")
    parser.add_argument("--heads", type=int, default=4, help="query heads, of 16 numbers each, for 2 key heads")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config(folder, options.heads)
        model = build(folder, seed=0)
        engine = TransformersEngine(folder)
        shard = folder / "model.safetensors"
        weights.save(tensors_of(model), shard)
        engine.load(0, weights.fingerprint(tensors_of(model)), [shard])
        prompts = prompts_of(*options.prompts)
        never: frozenset[int] = frozenset()
        requests = [GenerationRequest(p, i, SAMPLES, 1.0, 1.0, options.tokens, never) for i, p in enumerate(prompts)]
        mask, ids = (part.repeat_interleave(SAMPLES, 0) for part in padded(prompts, PAD, torch.device("cpu")))

        def sampling_loop() -> object:
            return engine.generate(requests, lambda: None)

        @torch.inference_mode()
        def transformers_generate() -> object:
            return model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )

        for warm_up in (sampling_loop, transformers_generate):
            warm_up()
        a, b = (median_seconds(work, options.repeats) for work in (sampling_loop, transformers_generate))
    total = PROMPTS * SAMPLES * options.tokens
    print(f"{'engine':12} {'tokens/s':>10}")
    print(f"{'relax':12} {total / a:10.0f}")
    print(f"{'generate':12} {total / b:10.0f}")
    print(f"ratio {b / a:.2f}")
    if options.json:
        print(json.dumps({"relax": total / a, "generate": total / b, "ratio": b / a}))


if __name__ == "__main__":
    main()
