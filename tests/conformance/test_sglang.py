"""The SGLang engine, on a real server, generates as the protocol says."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.teacher import SglangTeacher
from relax_actors.engines.torch.scorer import TorchTeacher
from relax_actors.errors import ActorError
from tests.conformance.base.inference_engine import FollowsGrammars, RowsJoin
from tests.conformance.base.language_model import LanguageModelConformance
from tests.support.models import publish, random_weights, request_of
from tests.support.sglang_servers import DENSE, Kept, config_of, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": False}, gateway={"port": 0}))
    yield kept
    kept.close()


class TestSglangEngine(LanguageModelConformance, RowsJoin, FollowsGrammars):
    implements = "sglang"
    runs_ahead = True
    long = replace(LanguageModelConformance.long, max_tokens=450)

    @pytest.fixture
    def config(self, server: Kept) -> Config:
        return server.config

    @pytest.fixture
    def engine(self, server: Kept) -> Iterator[SglangEngine]:
        with engine_of(server, grammars=True) as engine:
            yield engine

    @pytest.mark.usefixtures("loaded")
    def test_server_scores_given_tokens_as_a_teacher_in_torch(self, server: Kept, tmp_path: Path) -> None:
        """Weights of `loaded` are those of `random_weights`, and an update flushes the key-value cache."""
        record, config = server.record, server.config
        shutil.copytree(config.model_path, tmp_path / "teacher")
        publish(random_weights(config), tmp_path / "teacher" / "model.safetensors")
        torch_teacher = TorchTeacher(config, tmp_path / "teacher")
        remote = SglangTeacher(record.url, record.key, 30.0, lambda: False)
        generator = np.random.default_rng(0)
        samples = [
            TrainSample.of_completion(generator.integers(1, 12, prompt), generator.integers(1, 12, completion))
            for prompt, completion in ((1, 1), (3, 9), (7, 2))
        ]
        # A token of an observation in the middle is not trained.
        samples[1].loss_mask[6] = False
        for top_k in (4, 0):
            expected = torch_teacher.score_top(samples, top_k, lambda: None)
            for ours, theirs in zip(remote.score_top(samples, top_k, lambda: None), expected, strict=True):
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
                np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-5)
                assert np.array_equal(ours.top_ids, theirs.top_ids)
        remote.close()


def test_server_that_left_its_device_goes_on_with_the_next_incarnation(server: Kept, tmp_path: Path) -> None:
    requests = [request_of("12>", seed, samples=2, greedy_samples=2, max_tokens=8) for seed in range(2)]
    control = Server(server.record)
    with engine_of(server) as engine:
        engine.load(3, *publish(random_weights(server.config), tmp_path / "published"))
        before = engine.generate(requests, lambda: None)
        assert engine.release_memory(None) == engine.resume_memory() == 0, "a server on a CPU keeps its memory"
        starts = server.starts
    control.leave(lambda: False)
    assert control.identity().startswith("3:"), "nor does its keeper have it leave"
    assert control.is_idle()
    control.release_memory()
    assert control.identity().startswith("away:3:")
    with engine_of(server) as engine:
        engine.load(3, *publish(random_weights(server.config), tmp_path / "published"))
        later = engine.generate(requests, lambda: None)
    for one, other in zip(*(chain.from_iterable(each) for each in (before, later)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert not control.resume_memory(), "the next incarnation has had it return"
    control.close()
    assert server.starts == starts


def test_teacher_that_does_not_answer_is_named_with_the_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        teacher = SglangTeacher(url, "", 0.0, lambda: False)
        sample = TrainSample.of_completion(np.array([1]), np.array([2]))
        message = rf"^the teacher at {url} does not answer within 0 s \(.*refused\); start it again$"
        with pytest.raises(ActorError, match=message):
            teacher.score_top([sample], 0, lambda: None)
        teacher.close()
