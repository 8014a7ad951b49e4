"""Real SGLang servers with weights in float8: their numbers after each way to update, in flight, and after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.sglang import presence
from relax_actors.engines.sglang.server import Server
from tests.conformance.base.inference_engine import pairs_of
from tests.integration.test_sglang import REQUESTS, generated_over_a_swap, loader_of, shards, tensors
from tests.support.batches import silent
from tests.support.models import publish, random_weights, request_of
from tests.support.quantised import WIDE, WIDE_EXPERTS, check_quantised
from tests.support.sglang_servers import Kept, config_of, engine_of, skip_if_missing

skip_if_missing()
if not presence.computes_float8():
    pytest.skip("relax-sglang-cpu is older; run `make sglang`", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FP8: dict[str, Any] = {"quantization": "fp8"}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A server of two ranks that share each layer, and compute the same batches with the same bits."""
    sglang = FP8 | {"tensor_parallel": 2}
    kept = Kept(
        config_of(tmp_path_factory.mktemp("run"), WIDE, run={"deterministic": True}, rollout={"sglang": sglang})
    )
    yield kept
    kept.close()


@pytest.mark.parametrize("way", ["disk", "shared", "group"])
def test_log_probs_are_those_of_rounded_weights_before_and_after_an_update(
    quantised: Kept, tmp_path: Path, way: str
) -> None:
    with engine_of(quantised, loader_of(quantised, way), **FP8) as engine:
        print_of, files = shards(quantised, tmp_path)
        engine.load(3, print_of, files)
        before = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        with closing(Server(quantised.record)) as server:
            assert server.identity() == f"3:{print_of}:fp8"
        engine.stage(4, tensors(quantised, 0.7))
        engine.swap()
        after = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
    assert {int(v) for _, s in before for v in s.versions} == {3}
    check_quantised(quantised.config, [*before, *after], {3: 1.0, 4: 0.7})


def test_samples_in_progress_continue_with_the_next_quantised_weights(quantised: Kept, tmp_path: Path) -> None:
    with engine_of(quantised, **FP8) as engine:
        engine.load(3, *shards(quantised, tmp_path))
        made = generated_over_a_swap(quantised, engine)
    for _, sample in made:
        assert set(sample.versions.tolist()) == {3, 4}
    check_quantised(quantised.config, made, {3: 1.0, 4: 0.7}, is_long=True)


def test_a_killed_server_quantises_the_same_weights_to_the_same_bits(quantised: Kept, tmp_path: Path) -> None:
    request = [request_of("12>", 1, samples=6, max_tokens=100)]
    found = []
    for killed in (False, True):
        with engine_of(quantised, keep_partial=False, rows=1, **FP8) as engine:
            engine.load(3, *shards(quantised, tmp_path))
            if killed:
                engine.load(4, *shards(quantised, tmp_path, 0.7))
                quantised.kill("scheduler_TP1")
                engine.load(5, *shards(quantised, tmp_path))
            found.append(engine.generate(request, silent)[0])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_experts_are_quantised_too(tmp_path: Path) -> None:
    shared = {"sglang": FP8 | {"tensor_parallel": 2}}
    config = config_of(tmp_path / "run", WIDE_EXPERTS, run={"deterministic": False}, rollout=shared)
    with closing(Kept(config)) as kept, engine_of(kept, **FP8) as engine:
        engine.load(3, *publish(random_weights(config), tmp_path / "3.safetensors"))
        made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        engine.load(4, *publish(random_weights(config, 0.7), tmp_path / "4.safetensors"))
        made += pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
    check_quantised(config, made, {3: 1.0, 4: 0.7})
