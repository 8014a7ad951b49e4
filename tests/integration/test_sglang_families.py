"""A real SGLang server gives the log-probs and experts of transformers for each text family marked in the docs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_actors.config import Config
from relax_actors.data.model_folder import expert_count, measure
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.torch.experts import Routers
from tests.conformance.base.inference_engine import pairs_of
from tests.support.batches import silent
from tests.support.models import ReferenceModel, publish, random_weights, request_of
from tests.support.sglang_servers import Kept, config_of, engine_of, skip_if_missing
from tests.support.text_families import SGLANG

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REQUESTS = [request_of(text, seed, samples=4) for text, seed in (("12>", 1), ("9081>", 2))]


def weights_of(config: Config, scale: float) -> dict[str, Tensor]:
    """Draw weights of which no bias is 0 and no norm 1; SGLang holds the sinks of gpt-oss in bfloat16."""
    source, tensors = torch.Generator().manual_seed(3), random_weights(config, scale)
    for name, tensor in tensors.items():
        tensor.add_(torch.randn(tensor.shape, generator=source), alpha=0.1)
        if name.endswith(".sinks"):
            tensor.copy_(tensor.bfloat16())
    return tensors


def chosen_by(reference: ReferenceModel, request: GenerationRequest, sample: Generation) -> Any:
    """Return the experts that the routers of transformers choose for a sample, sorted, `[tokens, layers, experts]`."""
    chosen: list[Tensor] = []
    sequence = torch.tensor([[*request.tokens.tolist(), *sample.tokens.tolist()]])[:, :-1]
    with torch.no_grad(), Routers(reference.model).recording(chosen):
        reference.model(sequence)
    return np.sort(torch.stack(chosen, 1).view(sequence.shape[1], len(chosen), -1).numpy(), -1)


@pytest.mark.parametrize("name", SGLANG)
def test_server_gives_the_log_probs_and_experts_of_transformers(tmp_path: Path, name: str) -> None:
    has_experts = expert_count(SGLANG[name]) > 0
    replay, run = {"router_replay": has_experts}, {"deterministic": False}
    config = config_of(tmp_path / "run", SGLANG[name], run=run, trainer=replay)
    moe = measure(config.model_path).moe if has_experts else None
    with closing(Kept(config)) as kept, engine_of(kept, moe=moe) as engine:
        for version, scale in ((1, 1.0), (2, 0.7)):
            tensors = weights_of(config, scale)
            reference = ReferenceModel(config, tensors)
            engine.load(version, *publish(tensors, tmp_path / f"{version}.safetensors"))
            for request, sample in pairs_of(REQUESTS, engine.generate(REQUESTS, silent)):
                assert {*sample.versions.tolist()} == {version}
                np.testing.assert_allclose(sample.logprobs, reference.logprobs(request, sample), atol=1e-5)
                assert (sample.routed_experts is not None) == has_experts
                if sample.routed_experts is not None:
                    expected = chosen_by(reference, request, sample)
                    np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), expected)
