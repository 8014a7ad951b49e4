"""An adapter in SGLang: the server's log-probs move with it, and are those of the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_actors.data.adapter import form_of
from relax_actors.engines.protocols import train
from relax_actors.engines.sglang.merged_adapter import MergedAdapter
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.runtime.run_folder import RunFolder
from tests.conformance.base.training_engine import begun, silent
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, batch_of_generations
from tests.support.models import request_of
from tests.support.sglang_servers import DENSE, Kept, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_log_probs_of_a_server_move_with_the_adapter_and_are_the_trainers(tmp_path: Path) -> None:
    rollout = {"backend": "sglang", "group_size": 4, "sglang": {"merge_adapter": True}}
    config = adapter_config(tmp_path / "run", base_folder(tmp_path, DENSE), rollout=rollout)
    config.folder.mkdir()
    RunFolder(config.folder).save_config(config, str(tmp_path))
    assert config.lora is not None
    merged = MergedAdapter(config.model_path, form_of(config.lora), torch.float32)
    trainer, request, kept, found = begun(TorchEngine(config)), request_of("12>", 3), Kept(config), []
    try:
        with engine_of(kept, merged=merged) as engine:
            for version in (0, 1):
                path = tmp_path / f"{version}.safetensors"
                engine.load(version, trainer.publish(path), [path])
                (samples,) = engine.generate([request], silent)
                batch = batch_of_generations([(request, sample) for sample in samples])
                scored = trainer.score(batch, silent)
                for mine, sample, item in zip(scored, samples, batch, strict=True):
                    np.testing.assert_allclose(sample.logprobs, mine[item.loss_mask], atol=1e-5)
                found.append(np.concatenate(trainer.score(batch_of(9), silent)))
                train(trainer, batch_of(version), version, silent)
    finally:
        kept.close()
    assert np.abs(found[0] - found[1]).max() > 1e-3
