"""Compare ranks of Megatron-Core that share the towers' work with ranks that each encode all media of their stage.

    python benchmarks/towers.py [--layouts tp2 cp2 pp2] [--images 8] [--patches 256] [--depth 6] [--steps 3] [--json]

Both train the same steps on a model like Qwen3-VL in float32, whose tower is larger than its decoder. Figures are those
of the busiest rank: CPU seconds of a step, and the memory at its peak beyond what the rank holds between
steps. Losses and gradient norms must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from process_memory import PROC, reset_peak, resident_mib
from training_workload import DENSE, config_of

from relax_actors.engines.protocols import MediaItem, PromptMedia, TrainSample, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.media.family import family_of

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
ROTARY: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
TEXT = DENSE | {"model_type": "qwen3_vl_text", "max_position_embeddings": 4096, "rope_parameters": ROTARY}
TICKS = os.sysconf("SC_CLK_TCK")


def architecture(depth: int) -> dict[str, Any]:
    """Return `model.architecture`, with `depth` layers in the tower."""
    vision: dict[str, Any] = {
        "depth": depth,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "patch_size": 8,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "in_channels": 3}
    vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
    return {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": vision}


def batch_of(folder: Path, images: int, patches: int) -> list[TrainSample]:
    """Return a sequence for each of some random images of about `patches` patches, which differ in size."""
    family, random, found = family_of(folder), np.random.default_rng(1), []
    assert family is not None and family.vision is not None  # noqa: S101, PT018 the model has a tower
    for row in range(images):
        height = 2 * max(1, round(np.sqrt(patches) * random.uniform(0.35, 0.65)))
        width = 2 * max(1, round(patches / height / 2))
        features = random.integers(0, 256, (height * width, 3 * family.vision.patch**2), np.uint8)
        count = height * width // 4
        ids = np.concatenate([[0], np.full(count, family.ids["image"]), [1]]).astype(np.int32)
        item = MediaItem("image", features, np.array([1, height, width], np.int32), 1, count)
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        arrays = {"logprobs": np.full(8, -2.0, np.float32), "advantages": np.ones(8, np.float32)}
        media, completion = PromptMedia((item,), positions, 0.0), random.integers(0, 2, 8).astype(np.int32)
        found.append(TrainSample.of_completion(ids, completion, media=media, row=row, **arrays))
    return found


def cpu_seconds(process: int) -> float:
    """CPU seconds of all threads of a process."""
    fields = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(layout: str, chosen: argparse.Namespace, *, share: bool) -> dict[str, float]:
    """Train some steps on ranks of their own; return the figures."""
    section, ranks = LAYOUTS[layout], int(np.prod([*LAYOUTS[layout].values()]))
    with tempfile.TemporaryDirectory() as folder:
        megatron = {"ranks": ranks, "share_towers": share, **section}
        most = chosen.images * chosen.patches // 2  # several images a micro-batch, which ranks share out
        settings = {"backend": "megatron", "megatron": megatron, "max_tokens_per_microbatch": most}
        config = config_of(Path(folder), architecture(chosen.depth), **settings)
        group = TrainerGroup(config)
        try:
            group.initialise(1)
            group.finish_warm_start()
            batch = batch_of(config.model_path, chosen.images, chosen.patches)
            train(group, batch, 0, lambda: None)  # creates the state of the optimizer
            held = {pid: resident_mib(pid) for pid in group.pids}
            before = {pid: cpu_seconds(pid) for pid in group.pids}
            for pid in group.pids:
                reset_peak(pid)
            for step in range(1, chosen.steps + 1):
                metrics = train(group, batch, step, lambda: None).metrics
            seconds = max(cpu_seconds(pid) - before[pid] for pid in group.pids) / chosen.steps
            peak = max(resident_mib(pid, peak=True) - held[pid] for pid in group.pids)
        finally:
            group.close()
    return {"cpu_s": seconds, "peak_mib": peak, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def main() -> None:
    """Measure each layout with and without sharing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["tp2", "cp2", "pp2"])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--patches", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = {}
    for layout in chosen.layouts:
        alone, shared = (measure(layout, chosen, share=share) for share in (False, True))
        for name in ("loss", "grad_norm"):
            if not np.isclose(alone[name], shared[name], rtol=1e-3, atol=1e-5):
                sys.exit(f"{layout}: {name} is {alone[name]} without and {shared[name]} with shared towers")
        figures[layout] = {"alone": alone, "shared": shared}
        ratio, less = shared["cpu_s"] / alone["cpu_s"], shared["peak_mib"] / max(alone["peak_mib"], 1e-9)
        print(
            f"{layout}: CPU seconds of a step {alone['cpu_s']:.2f} alone, {shared['cpu_s']:.2f} shared ({ratio:.0%}); "
            f"peak of a step {alone['peak_mib']:.0f} MiB alone, {shared['peak_mib']:.0f} MiB shared ({less:.0%})",
            file=sys.stderr if chosen.json else sys.stdout,
            flush=True,
        )
    if chosen.json:
        print(json.dumps({"load": os.getloadavg()[0], "layouts": figures}))


if __name__ == "__main__":
    main()
