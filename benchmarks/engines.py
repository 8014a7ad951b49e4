"""Compare tokens per second of the transformers and SGLang engines on the same small model, interleaved.

The transformers engine generates in this process, SGLang in its server, with one thread each. All samples end after the
same number of tokens, because stop tokens would give the two engines unequal lengths.

    python benchmarks/engines.py [--tokens 16 64 256] [--hidden 64] [--layers 3] [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from broker.process import spawn, stop
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.weight_loaders import FileLoader
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.node import actor_environment
from relax_actors.supervision.pools import server_launch
from relax_actors.weights import files as weights

PROMPTS, SAMPLES, LENGTH = 16, 8, 12
START_SECONDS = 600.0
Engine: TypeAlias = TransformersEngine | SglangEngine


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model, and the precision of its server."""

    hidden: int
    layers: int
    vocabulary: int = 512
    precision: str = "float32"


def config_of(folder: Path, size: Size, device: str = "cpu", **sglang: Any) -> Config:
    """Configuration of a run with a model of random weights, and settings of [rollout.sglang]."""
    heads = max(4, size.hidden // 64)
    model = {
        "model_type": "qwen3",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.hidden * 11 // 4,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "head_dim": size.hidden // heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    tree = {
        "run": {"name": "engines", "folder": str(folder)},
        "model": {"architecture": model, "tokenizer": {"alphabet": "0123456789#"}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"precision": size.precision},
        "rollout": {"backend": "sglang", "max_concurrent_prompts": PROMPTS, "group_size": SAMPLES, "device": device}
        | {"sglang": sglang},
    }
    config = validate(tree, "benchmark")
    prepare(config, config.model_path)
    RunFolder(folder).save_config(config, str(folder))
    return config


@contextmanager
def server_of(config: Config) -> Iterator[Path]:
    """Run a server under its keeper, like a node; yield the path of its record."""
    folder = RunFolder(config.folder)
    with folder.root.joinpath("server.log").open("ab") as log:
        environment = actor_environment(config)
        command = server_launch(folder, 0, environment).command
        keeper = spawn(command, log=log, environment=os.environ | environment)
    try:
        end = time.monotonic() + START_SECONDS
        while ServerRecord.load(folder.server(0)) is None:
            if keeper.poll() is not None or time.monotonic() > end:
                sys.exit((folder.root / "server.log").read_text()[-4000:])
            time.sleep(0.2)
        yield folder.server(0)
    finally:
        stop(keeper, 5)


def seconds(engine: Engine, tokens: int) -> float:
    """Wall time of generating all samples."""
    prompts = np.random.default_rng(0).integers(0, 500, (PROMPTS, LENGTH)).astype(np.int32)
    requests = [GenerationRequest(p, i, SAMPLES, 1.0, 1.0, tokens, frozenset()) for i, p in enumerate(prompts)]
    began = time.perf_counter()
    groups = engine.generate(requests, lambda: None)
    taken = time.perf_counter() - began
    if {len(sample.tokens) for group in groups for sample in group} != {tokens}:
        sys.exit("an engine ended samples before the requested number of tokens")
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(Path(scratch) / "run", Size(options.hidden, options.layers))
        model = build(config.model_path, seed=0)
        shard = Path(scratch) / "model.safetensors"
        weights.save(tensors_of(model), shard)
        print_of = weights.fingerprint(tensors_of(model))
        with server_of(config) as record:
            length = measure(config.model_path).context_length
            loader = FileLoader(Path(scratch) / "weights")
            settings = SglangSettings(length, rows=PROMPTS, patience=START_SECONDS, stall=60.0)
            engines: dict[str, Engine] = {
                "transformers": TransformersEngine(config.model_path),
                "sglang": SglangEngine(lambda: ServerRecord.load(record), loader, settings),
            }
            found: dict[str, dict[int, float]] = {name: {} for name in engines}
            for engine in engines.values():
                engine.load(0, print_of, [shard])
                seconds(engine, min(options.tokens))
            for tokens in options.tokens:
                times: dict[str, list[float]] = {name: [] for name in engines}
                for _ in range(options.repeats):
                    for name, engine in engines.items():
                        times[name].append(seconds(engine, tokens))
                for name, taken in times.items():
                    found[name][tokens] = PROMPTS * SAMPLES * tokens / statistics.median(taken)
            for engine in engines.values():
                engine.close()
    print(f"{PROMPTS * SAMPLES} samples, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    print(f"{'tokens/s':14}" + "".join(f"{f'{tokens} tokens':>12}" for tokens in options.tokens))
    for name, rates in found.items():
        print(f"{name:14}" + "".join(f"{rates[tokens]:12.0f}" for tokens in options.tokens))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
