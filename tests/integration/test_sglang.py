"""What only SGLang does, on a real server: ways to load weights, lost servers, experts; the rest is in conformance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from broker.errors import StoreError
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.server import Server, ServerGoneError
from relax_actors.engines.sglang.weight_loaders import (
    BroadcastLoader,
    FileLoader,
    StagedWeights,
    WeightLoader,
)
from relax_actors.engines.torch.experts import Routers
from relax_actors.errors import ActorError, EngineError
from tests.conformance.base.inference_engine import pairs_of
from tests.support.batches import silent
from tests.support.models import (
    ReferenceModel,
    check_logprobs,
    publish,
    random_weights,
    request_of,
    stop_strings,
)
from tests.support.sglang_servers import DENSE, MOE, Kept, config_of, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


REQUESTS = [request_of(text, seed, samples=8) for text, seed in (("12>", 1), ("9081>", 2))]
REQUESTS.append(request_of("5>", 3, samples=8, temperature=0.7))
LONG = [request_of("12>", 1, max_tokens=450, stop_ids=frozenset())]
STRINGS = stop_strings("123", "45", "709")
ENDED = request_of("12>", 4, samples=8, max_tokens=300, stop_ids=frozenset(), stop_strings=STRINGS)


def tensors(kept: Kept, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return random_weights(kept.config, scale)


def shards(kept: Kept, tmp_path: Path, scale: float = 1.0) -> tuple[str, list[Path]]:
    """The same weights, published."""
    return publish(tensors(kept, scale), tmp_path / f"{scale}.safetensors")


def loader_of(kept: Kept, way: str) -> WeightLoader:
    """Loader of a value of `rollout.sglang.weights`."""
    if way == "group":
        return BroadcastLoader(kept.config.rollout.sglang.tensor_parallel)
    return FileLoader(kept.folder.weights, in_memory=way == "shared")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A server of two ranks that share each layer."""
    folder = tmp_path_factory.mktemp("pair")
    pair = Kept(config_of(folder, DENSE, run={"deterministic": False}, rollout={"sglang": {"tensor_parallel": 2}}))
    yield pair
    pair.close()


@pytest.mark.parametrize("server", ["kept", "pair"])
@pytest.mark.parametrize("way", ["disk", "shared", "group"])
def test_weights_are_served_under_their_version(
    request: pytest.FixtureRequest, tmp_path: Path, way: str, server: str
) -> None:
    kept: Kept = request.getfixturevalue(server)
    ranks = kept.config.rollout.sglang.tensor_parallel
    with engine_of(kept, loader_of(kept, way)) as engine:
        engine.load(3, *shards(kept, tmp_path))
        engine.stage(4, tensors(kept, 0.7))
        assert engine.version == 3
        before = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        assert engine.swap() == engine.version == 4
        after = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        assert {int(v) for _, s in before for v in s.versions} == {3}
        assert {int(v) for _, s in after for v in s.versions} == {4}
        check_logprobs(kept.config, [*before, *after], {3: 1.0, 4: 0.7}, 1e-5)
        with pytest.raises(StoreError, match="nothing can be swapped"):
            engine.swap()
        assert len({title for title in kept.processes().values() if "scheduler" in title}) == ranks


def test_samples_beyond_the_places_of_a_server_wait_for_others(tmp_path: Path) -> None:
    few = Kept(config_of(tmp_path / "run", DENSE, rollout={"sglang": {"max_concurrent_samples": 3}}))
    try:
        with engine_of(few) as engine:
            engine.load(3, *shards(few, tmp_path))
            made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        assert len(made) == 24
        check_logprobs(few.config, made, {3: 1.0}, 1e-5)
        record = few.record
        headers = {"Authorization": f"Bearer {record.key}"}
        facts = httpx.get(f"{record.url}/server_info", headers=headers, timeout=20, trust_env=False).json()
        assert facts["max_running_requests"] == 3
    finally:
        few.close()


def test_damaged_weights_are_never_served(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        print_of, files = shards(kept, tmp_path)
        with pytest.raises(StoreError, match="published was"):
            engine.load(9, "0" * 32, files)
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(REQUESTS, silent)
        engine.stage(9, tensors(kept))
        (staged,) = kept.folder.weights.glob(f"*/9-{print_of}.*")
        damaged = bytearray((staged / "model.safetensors").read_bytes())
        damaged[-1] ^= 1
        (staged / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ActorError, match="not those of version 9"):
            engine.swap()
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(REQUESTS, silent)


def generated_over_a_swap(kept: Kept, engine: SglangEngine) -> list[tuple[GenerationRequest, Generation]]:
    """Generate long samples; version 4 replaces the version before it on the way."""
    grown = 0

    def progress() -> None:
        nonlocal grown
        grown += 1

    def refresh() -> bool:
        if grown < 2 or engine.version == 4:
            return False
        engine.stage(4, tensors(kept, 0.7))
        return engine.swap() == 4

    return pairs_of(LONG, engine.generate(LONG, progress, refresh))


class SlowOnce(FileLoader):
    """Gives up its first load of version 4; the server continues with the older weights."""

    given_up = False

    def load(self, server: Server, staged: StagedWeights) -> None:
        if staged.version == 4 and not self.given_up:
            self.given_up = True
            server.resume()
            msg = "the answer took too long"
            raise ServerGoneError(msg)
        super().load(server, staged)


def test_a_server_that_timed_out_during_a_weight_update_is_abandoned(kept: Kept, tmp_path: Path) -> None:
    loader = SlowOnce(kept.folder.weights)
    with engine_of(kept, loader) as engine:
        engine.load(3, *shards(kept, tmp_path))
        made = generated_over_a_swap(kept, engine)
        assert engine.losses == 1
        check_logprobs(kept.config, made, {3: 1.0, 4: 0.7}, 5e-5)
        after = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        assert {int(v) for _, s in after for v in s.versions} == {4}
        check_logprobs(kept.config, after, {4: 0.7}, 1e-5)


def test_an_update_left_open_by_an_earlier_incarnation_is_closed(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept, loader_of(kept, "group")) as engine:
        engine.load(3, *shards(kept, tmp_path))
    record = kept.record
    with httpx.Client(base_url=record.url, headers={"Authorization": f"Bearer {record.key}"}, timeout=60) as client:
        assert client.post("/begin_weight_update", json={}).status_code == 200
        with engine_of(kept, loader_of(kept, "group")) as engine:
            engine.load(3, *shards(kept, tmp_path))
            assert client.post("/end_weight_update", json={}).status_code == 400
            made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
    assert kept.record == record
    check_logprobs(kept.config, made, {3: 1.0}, 1e-5)


def test_weights_are_loaded_again_after_a_failed_load(kept: Kept, tmp_path: Path) -> None:
    print_of, files = shards(kept, tmp_path)
    with engine_of(kept) as engine:
        engine.load(3, print_of, files)
    with closing(Server(kept.record)) as server:
        named = server.identity()
        with pytest.raises(EngineError, match="refuses /update_weights_from_disk"):
            server.load_files(tmp_path / "nothing", "4:x")
        assert server.identity() != named
        with engine_of(kept) as engine:
            engine.load(3, print_of, files)
            assert server.identity() == named
            check_logprobs(kept.config, pairs_of(REQUESTS, engine.generate(REQUESTS, silent)), {3: 1.0}, 1e-5)


def test_the_server_refuses_requests_without_its_key(kept: Kept) -> None:
    record = kept.record
    assert record.url.startswith("http://127.0.0.1:")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    for path in ("/generate", "/update_weights_from_disk", "/abort_request"):
        assert httpx.post(record.url + path, json=body).status_code == 401
    assert kept.folder.server(0).stat().st_mode & 0o077 == 0
    assert not [title for title in kept.processes().values() if record.key in title]


def test_a_refusal_of_the_server_is_reported_in_its_words(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        with pytest.raises(EngineError, match="refuses a row"):
            engine.generate([request_of("12>", 1, samples=8, temperature=-1.0)], silent)
        assert len(engine.generate(REQUESTS, silent)) == 3


def test_the_chosen_experts_of_every_token_are_reported(tmp_path: Path) -> None:
    kept = Kept(config_of(tmp_path / "run", MOE, trainer={"router_replay": True}))
    reference = ReferenceModel(kept.config, tensors(kept))
    routers = Routers(reference.model)
    try:
        with engine_of(kept, moe=measure(kept.config.model_path).moe) as engine:
            engine.load(3, *shards(kept, tmp_path))
            # Some samples are aborted when a stop string has ended in them.
            requests = [*REQUESTS, ENDED]
            made = pairs_of(requests, engine.generate(requests, silent))
            check_logprobs(kept.config, made, {3: 1.0}, 5e-5)
    finally:
        kept.close()
    assert any(STRINGS.find(sample.tokens.tolist()) for asked, sample in made if asked is ENDED)
    for asked, sample in made:
        chosen: list[torch.Tensor] = []
        sequence = torch.tensor([[*asked.tokens.tolist(), *sample.tokens.tolist()]])[:, :-1]
        with torch.no_grad(), routers.recording(chosen):
            reference.model(sequence)
        expected = torch.stack(chosen, 1).view(sequence.shape[1], len(chosen), -1).numpy()
        assert sample.routed_experts is not None
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(expected, -1))
