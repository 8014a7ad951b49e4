"""Weights that match trainer.freeze stay what they are; all others are trained as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.engines.megatron import installation
from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError
from tests.support.batches import batch_of, silent
from tests.support.tiny_megatron import DENSE, MOE, config_of
from tests.support.trained_engines import weights_of

PATTERNS = ["model.embed_tokens.*", "model.layers.[01].*", "*.gate.weight", "*_layernorm.weight"]


def engine_of(backend: str, tmp_path: Path, architecture: dict[str, Any], **trainer: Any) -> Any:
    settings = {"backend": backend, "learning_rate": 1e-3, **trainer}
    config = config_of(
        tmp_path, architecture, algorithm={"kl": {"place": "loss", "coefficient": 0.1}}, trainer=settings
    )
    if backend == "torch":
        return TorchEngine(config)
    try:
        installation.require()
    except ConfigError as error:
        pytest.skip(str(error))
    from relax_actors.engines.megatron.mcore.engine import MegatronEngine

    return MegatronEngine(config)


def moved(engine: Any, tmp_path: Path, steps: int = 2) -> dict[str, float]:
    """How far each weight has moved in some steps."""
    engine.initialise(5)
    engine.finish_warm_start()
    before = weights_of(engine, tmp_path / "before")
    for step in range(steps):
        train(engine, batch_of(step), step, silent)
    after = weights_of(engine, tmp_path / "after")
    return {name: float((after[name] - before[name]).abs().max()) for name in before}


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_frozen_stays_and_the_rest_is_trained(tmp_path: Path, backend: str, *, tied: bool) -> None:
    architecture = MOE | {"tie_word_embeddings": tied}
    found = moved(engine_of(backend, tmp_path, architecture, freeze=PATTERNS), tmp_path)
    frozen = {name for name, far in found.items() if far == 0}
    starts, ends = ("model.embed_tokens.", "model.layers.0.", "model.layers.1."), ("gate.weight", "_layernorm.weight")
    wanted = {name for name in found if name.startswith(starts) or name.endswith(ends)}
    assert frozen == wanted
    assert min(far for name, far in found.items() if name not in wanted) > 1e-4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_both_engines_train_the_same_rest(tmp_path: Path, recompute: str) -> None:
    found = []
    for backend in ("torch", "megatron"):
        engine = engine_of(backend, tmp_path, DENSE, freeze=["model.embed_tokens.*"], recompute=recompute)
        moved(engine, tmp_path, steps=4)
        folder = tmp_path / f"{backend}.{recompute}"
        folder.mkdir()
        engine.save(folder)
        other = engine_of(backend, tmp_path, DENSE, freeze=["model.embed_tokens.*"], recompute=recompute)
        other.load(folder)
        assert other.fingerprint() == engine.fingerprint()
        train(engine, batch_of(9), 9, silent)
        train(other, batch_of(9), 9, silent)
        assert other.fingerprint() == engine.fingerprint()
        found.append(weights_of(engine, tmp_path / backend))
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) < 5e-5


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_pattern_that_means_nothing_is_refused(tmp_path: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"'model\.embed' matches no weight of the model; it has"):
        engine_of(backend, tmp_path, DENSE, freeze=["model.embed"])
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        engine_of(backend, tmp_path, DENSE, freeze=["*"])


def test_a_part_of_what_megatron_core_keeps_as_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight'\], .*one parameter"):
        engine_of("megatron", tmp_path, DENSE, freeze=["*.q_proj.weight"])
