"""Several ranks of the torch engine train what one process trains, for every model and number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config.training import CriticSection, TorchSection
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks.group import CriticGroup
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.weights import files as weights
from tests.conformance.base.critic_engine import policy_of, updated
from tests.integration.test_torch_ranks import LIMIT, MOE, UNTIED, assert_close
from tests.support.batches import answers, batch_of, silent
from tests.support.media_batches import media_batch
from tests.support.models import QWEN3, request_of
from tests.support.tiny_media_models import architecture_of
from tests.support.torch_ranks import ranks_config, ranks_of, trained
from tests.support.trained_engines import max_difference, started, weights_of

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": (QWEN3, {}),
    "untied": (UNTIED, {}),
    "experts": (MOE, {}),
    "recomputed": (MOE, {"recompute": "full"}),
    "whole step": (QWEN3, {"algorithm": {"entropy": {"quantile": 0.5}}}),
    "frozen": (UNTIED, {"freeze": ["model.embed_tokens.*", "*.0.*"]}),
    "offloaded": (QWEN3, {"offload": True}),
}
WIDE = ("tied", "experts")
"""Cases that train with four ranks as well."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_several_ranks_train_what_one_process_trains(tmp_path: Path, name: str) -> None:
    architecture, settings = CASES[name]
    found = []
    for ranks in (1, 2, 4) if name in WIDE else (1, 2):
        with ranks_of(ranks_config(tmp_path / str(ranks), architecture, ranks, **settings)) as engine:
            engine.initialise(5)
            warm = dict(engine.warm_start(answers([request_of("12>", 0).tokens], [3, 4, 11]), 1e-3, silent).metrics)
            engine.finish_warm_start()
            found.append(([warm, *trained(engine)], weights_of(engine, tmp_path / f"weights{ranks}")))
    for several in found[1:]:
        assert_close(several, found[0])


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "precision"), [(QWEN3, "bfloat16"), (UNTIED, "float16")])
def test_ranks_in_half_precision_train_what_one_process_trains(
    tmp_path: Path, architecture: dict[str, Any], precision: str
) -> None:
    found = []
    for ranks in (1, 2):
        config = ranks_config(tmp_path / str(ranks), architecture, ranks, precision=precision)
        with ranks_of(config) as engine:
            metrics = trained(started(engine))
            engine.remember()
            train(engine, batch_of(7), 7, silent)
            delta = engine.delta()
            if delta is not None:
                assert delta(tmp_path / f"delta{ranks}") == engine.fingerprint()
            found.append((metrics, weights_of(engine, tmp_path / f"weights{ranks}")))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=3e-2)
    assert max_difference({n: t.float() for n, t in found[0][1].items()}, found[1][1]) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_omni_thinker"])
def test_two_ranks_train_media_that_one_of_them_does_not_have(tmp_path: Path, model_type: str) -> None:
    # An update of AdamW is learning_rate * g / (|g| + epsilon), so that weights differ as gradients do.
    settings = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 120}
    found = []
    for ranks in (1, 2):
        config = ranks_config(tmp_path / str(ranks), architecture_of(model_type), ranks, **settings)
        samples = media_batch(config)
        mixed = [*samples[:2], *(replace(sample, row=sample.row + 100) for sample in batch_of(3))]
        with ranks_of(config) as engine:
            started(engine)
            metrics = [dict(train(engine, batch, step, silent).metrics) for step, batch in enumerate((samples, mixed))]
            found.append((metrics, weights_of(engine, tmp_path / f"weights{ranks}")))
    assert_close(found[1], found[0])


@pytest.mark.slow
def test_two_ranks_of_a_critic_train_what_one_process_trains(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        config = ranks_config(tmp_path / str(ranks), QWEN3, 1)
        settings = CriticSection(learning_rate=1e-3, value_clip=0.05, torch=TorchSection(ranks=ranks))
        if ranks == 1:
            critic: Any = TorchCritic(config, settings)
        else:
            critic = CriticGroup(config.model_copy(update={"critic": settings}), lambda *_: None)
        critic.initialise(policy_of(config, tmp_path))
        metrics = [dict(updated(critic, step)) for step in range(3)]
        (folder := tmp_path / f"checkpoint{ranks}").mkdir()
        critic.begin_save(folder)()
        kept = critic.fingerprint()
        updated(critic, 3)
        last = critic.fingerprint()
        critic.load(folder)
        assert critic.fingerprint() == kept
        updated(critic, 3)
        assert critic.fingerprint() == last
        critic.export(exported := tmp_path / f"critic{ranks}")
        written = weights.load(sorted(exported.glob("*.safetensors")))
        found.append((metrics, written, critic.values(batch_of(9), silent)))
        if ranks > 1:
            critic.close()
    assert_close(found[1][:2], found[0][:2])
    for one, other in zip(found[0][2], found[1][2], strict=True):
        np.testing.assert_allclose(one, other, atol=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with ranks_of(ranks_config(tmp_path / "2", UNTIED, 2)) as engine:
        trained(started(engine), range(2))
        engine.save(folder)
        expected = trained(engine, range(2, 4)), weights_of(engine, tmp_path / "expected")
    with ranks_of(ranks_config(tmp_path / "other", UNTIED, ranks)) as engine:
        engine.load(folder)
        assert_close((trained(engine, range(2, 4)), weights_of(engine, tmp_path / "found")), expected)
