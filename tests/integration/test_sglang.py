"""The SGLang engine on a real server: the numbers of the transformers engine, and no death that changes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.loading import FromDisk, Staged
from relax_actors.engines.sglang.server import Server, ServerGoneError
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.model import build, copy_into, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ActorError, EngineError, StoreError
from relax_actors.messages import FinishReason
from relax_actors.supervision.janitor import SHARED_MEMORY, members
from relax_actors.weights import files as weights
from tests.support.running import wait_until
from tests.support.sglang_servers import (
    ALPHABET,
    DENSE,
    MOE,
    STOP,
    FromGroup,
    FromTensors,
    Kept,
    config_of,
    engine_of,
    skip_if_missing,
)

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def request(text: str, seed: int, **fields: Any) -> GenerationRequest:
    tokens = np.array([ALPHABET.index(c) for c in text], np.int32)
    settings = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "stop_ids": frozenset([STOP])}
    return GenerationRequest(tokens, seed, **(settings | fields))


REQUESTS = [request("12>", 1), request("9081>", 2), request("5>", 3, temperature=0.7)]
LONG = [request("12>", 1, samples=4, max_tokens=450, stop_ids=frozenset())]


def nothing() -> None: ...


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": False}))
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": True}))
    yield kept
    kept.close()


def tensors(kept: Kept, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights of the model, drawn at random: large, so that distributions are far from uniform."""
    model = build(kept.config.model_path, seed=7)
    return {name: tensor.detach() * 2 * factor for name, tensor in tensors_of(model).items()}


def shards(kept: Kept, tmp_path: Path, factor: float = 1.0) -> tuple[str, list[Path]]:
    """The same, published."""
    found = tensors(kept, factor)
    path = tmp_path / f"{factor}.safetensors"
    weights.save(found, path)
    return weights.fingerprint(found.items()), [path]


def check_logprobs(
    kept: Kept, made: list[tuple[GenerationRequest, Generation]], versions: dict[int, float], bound: float
) -> None:
    """Each token's log-prob is that of its version after all tokens before it, whoever wrote those."""
    model = build(kept.config.model_path)
    for version, factor in versions.items():
        copy_into(model, tensors(kept, factor), "test")
        for request, sample in made:
            with torch.no_grad():
                sequence = torch.tensor([[*request.tokens.tolist(), *sample.tokens.tolist()]])
                logits = model(sequence).logits[0, len(request.tokens) - 1 : -1] / request.temperature
            expected = logits.log_softmax(-1).gather(1, sequence[0, len(request.tokens) :, None])[:, 0].numpy()
            wrote = sample.versions == version
            np.testing.assert_allclose(sample.logprobs[wrote], expected[wrote], atol=bound)


def pairs(
    requests: list[GenerationRequest], groups: list[list[Generation]]
) -> list[tuple[GenerationRequest, Generation]]:
    return [(r, sample) for r, group in zip(requests, groups, strict=True) for sample in group]


def test_it_generates_as_the_transformers_engine_scores(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(REQUESTS, nothing)
        engine.load(3, *shards(kept, tmp_path))
        made = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
        assert engine.version == 3
        assert len(made) == 24
        check_logprobs(kept, made, {3: 1.0}, 1e-5)
        for _, sample in made:
            ended = sample.tokens[-1] == STOP
            assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert STOP not in sample.tokens[:-1]
            assert len(sample.tokens) == 9 or ended
            assert set(sample.versions) == {3}
        assert {len(sample.tokens) for _, sample in made} > {9}
        greedy = [replace(r, samples=1, greedy=True) for r in REQUESTS]
        other = TransformersEngine(kept.config.model_path)
        other.load(3, *shards(kept, tmp_path))
        both = zip(engine.generate(greedy, nothing), other.generate(greedy, nothing), strict=True)
        for (ours,), (theirs,) in both:
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_sampled_tokens_follow_the_distribution_also_with_top_p(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        samples = engine.generate([request("12>", 7, samples=1000, max_tokens=1)], nothing)[0]
        counts = np.bincount([int(s.tokens[0]) for s in samples], minlength=14) / 1000
        expected = np.zeros(14)
        for s in samples:
            expected[int(s.tokens[0])] = np.exp(s.logprobs[0])
        np.testing.assert_allclose(counts, expected, atol=0.06)
        narrow = engine.generate([request("12>", 7, samples=200, max_tokens=1, top_p=0.3)], nothing)[0]
        order = np.argsort(-expected)
        wanted = int((np.cumsum(expected[order]) < 0.3).sum()) + 1
        assert {int(s.tokens[0]) for s in narrow} <= set(order[:wanted].tolist())


@pytest.mark.parametrize("way", ["disk", "tensors", "group"])
def test_other_weights_give_other_numbers_under_their_version(kept: Kept, tmp_path: Path, way: str) -> None:
    loaders = {"disk": None, "tensors": FromTensors(1), "group": FromGroup(1)}
    with engine_of(kept, loaders[way]) as engine:
        engine.load(3, *shards(kept, tmp_path))
        engine.stage(4, tensors(kept, 0.7))
        assert engine.version == 3
        before = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
        assert engine.swap() == engine.version == 4
        after = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
        assert {int(v) for _, s in before for v in s.versions} == {3}
        assert {int(v) for _, s in after for v in s.versions} == {4}
        check_logprobs(kept, [*before, *after], {3: 1.0, 4: 0.7}, 1e-5)
        with pytest.raises(StoreError, match="nothing can be swapped"):
            engine.swap()


def test_weights_that_are_not_what_was_published_are_not_served(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        print_of, files = shards(kept, tmp_path)
        with pytest.raises(StoreError, match="published was"):
            engine.load(9, "0" * 32, files)
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(REQUESTS, nothing)
        engine.stage(9, tensors(kept))
        (staged,) = kept.folder.server(0).with_suffix("").iterdir()
        damaged = bytearray((staged / "model.safetensors").read_bytes())
        damaged[-1] ^= 1
        (staged / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ActorError, match="not those of version 9"):
            engine.swap()
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(REQUESTS, nothing)
        assert print_of in staged.name


def generated_over_a_swap(kept: Kept, engine: SglangEngine) -> list[tuple[GenerationRequest, Generation]]:
    """Long samples, in the middle of which version 4 takes the place of the one before."""
    grown = 0

    def progress() -> None:
        nonlocal grown
        grown += 1

    def refresh() -> bool:
        if grown < 2 or engine.version == 4:
            return False
        engine.stage(4, tensors(kept, 0.7))
        return engine.swap() == 4

    return pairs(LONG, engine.generate(LONG, progress, refresh))


def test_samples_go_on_with_newer_weights_and_tell_who_wrote_which_token(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        made = generated_over_a_swap(kept, engine)
        for _, sample in made:
            assert len(sample.tokens) == 450
            assert sorted(set(sample.versions)) == [3, 4]
            assert (np.diff(sample.versions) >= 0).all()
        check_logprobs(kept, made, {3: 1.0, 4: 0.7}, 5e-5)


class SlowOnce(FromDisk):
    """Its first load of version 4 is given up, and the server goes on without."""

    given_up = False

    def load(self, server: Server, staged: Staged) -> None:
        if staged.version == 4 and not self.given_up:
            self.given_up = True
            server.resume()
            msg = "the answer took too long"
            raise ServerGoneError(msg)
        super().load(server, staged)


def test_a_server_that_may_not_have_taken_weights_in_flight_is_not_used_on(kept: Kept, tmp_path: Path) -> None:
    loader = SlowOnce(kept.folder.server(0).with_suffix(""))
    with engine_of(kept, loader) as engine:
        engine.load(3, *shards(kept, tmp_path))
        made = generated_over_a_swap(kept, engine)
        assert engine.losses == 1
        check_logprobs(kept, made, {3: 1.0, 4: 0.7}, 5e-5)
        after = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
        assert {int(v) for _, s in after for v in s.versions} == {4}
        check_logprobs(kept, after, {4: 0.7}, 1e-5)


def test_an_update_that_a_life_before_left_open_is_closed(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept, FromTensors(1)) as engine:
        engine.load(3, *shards(kept, tmp_path))
    record = kept.record
    with httpx.Client(base_url=record.url, headers={"Authorization": f"Bearer {record.key}"}, timeout=60) as client:
        assert client.post("/begin_weight_update", json={}).status_code == 200
        with engine_of(kept, FromTensors(1)) as engine:
            engine.load(3, *shards(kept, tmp_path))
            assert client.post("/end_weight_update", json={}).status_code == 400
            made = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
    assert kept.record == record
    check_logprobs(kept, made, {3: 1.0}, 1e-5)


def test_weights_that_were_not_loaded_to_the_end_are_given_again_under_the_same_name(
    kept: Kept, tmp_path: Path
) -> None:
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
            check_logprobs(kept, pairs(REQUESTS, engine.generate(REQUESTS, nothing)), {3: 1.0}, 1e-5)


def test_a_life_after_a_crash_finds_the_server_with_its_weights(kept: Kept, tmp_path: Path) -> None:
    print_of, (shard,) = shards(kept, tmp_path)
    with engine_of(kept) as engine:
        engine.load(6, print_of, [shard])
    record, log, starts = kept.record, kept.folder.log("server.0"), kept.starts
    script = (
        "import sys, numpy as np, pathlib\n"
        "from relax_actors.engines.protocols import GenerationRequest\n"
        "from relax_actors.engines.sglang.engine import SglangEngine\n"
        "from relax_actors.engines.sglang.loading import FromDisk\n"
        "from relax_actors.engines.sglang.record import ServerRecord\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "find = lambda: ServerRecord.load(path)\n"
        "engine = SglangEngine(find, FromDisk(path.with_suffix('')), 512, rows=1, patience=60, stall=60)\n"
        "engine.load(6, sys.argv[2], [pathlib.Path(sys.argv[3])])\n"
        "tokens = np.array([1, 2], np.int32)\n"
        "request = GenerationRequest(tokens, 1, 4, 1.0, 1.0, 500, frozenset())\n"
        "engine.generate([request], lambda: print('generating', flush=True))\n"
    )
    command = [sys.executable, "-c", script, str(kept.folder.server(0)), print_of, str(shard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as life:
        assert life.stdout is not None
        assert "generating" in life.stdout.readline()
        life.kill()
    loads = log.read_text().count("Start update_weights")
    with engine_of(kept) as engine:
        engine.load(6, print_of, [shard])
        made = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
        check_logprobs(kept, made, {6: 1.0}, 1e-5)
    assert kept.record == record
    assert log.read_text().count("Start update_weights") == loads
    assert kept.starts == starts


def test_rows_join_those_that_run_and_each_is_given_out_when_it_ends(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        late, grown, order = [request("9081>", 2, max_tokens=5), request("5>", 3)], 0, []

        def progress() -> None:
            nonlocal grown
            grown += 1

        def more(most: int) -> list[GenerationRequest]:
            assert most > 0
            # Once the first has tokens.
            return (
                [late[len(order)]] if grown > 1 and len(order) < len(late) and engine._rows.open.keys() == {0} else []
            )

        for done in engine.stream(LONG, progress, None, more):
            order += done
        assert [i for i, _ in order] == [1, 2, 0]
        made = dict(order)
        check_logprobs(kept, pairs([*LONG, *late], [made[0], made[1], made[2]]), {3: 1.0}, 5e-5)


def test_the_server_is_closed_to_strangers(kept: Kept) -> None:
    record = kept.record
    assert record.url.startswith("http://127.0.0.1:")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    for path in ("/generate", "/update_weights_from_disk", "/abort_request"):
        assert httpx.post(record.url + path, json=body).status_code == 401
    assert kept.folder.server(0).stat().st_mode & 0o077 == 0
    assert not [title for title in kept.processes().values() if record.key in title]


@pytest.mark.parametrize("part", ["scheduler", "engines.sglang.launch", "supervision.keeper"])
def test_a_killed_server_comes_back_and_samples_go_on(kept: Kept, tmp_path: Path, part: str) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        life, grown, lengths = kept.record.life, 0, []

        def progress() -> None:
            nonlocal grown
            grown += 1
            if grown == 2:
                kept.kill(part)
                lengths.extend(len(sample) for sample in engine._rows.samples)

        made = pairs(LONG, engine.generate(LONG, progress))
        assert engine.losses == 1
        assert min(lengths) > 0
        assert kept.record.life != life
        for _, sample in made:
            assert len(sample.tokens) == 450
            assert set(sample.versions) == {3}
        check_logprobs(kept, made, {3: 1.0}, 5e-5)


def test_a_server_that_hangs_is_ended_and_started_again(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept, stall=2.0) as engine:
        engine.load(3, *shards(kept, tmp_path))
        grown = 0

        def progress() -> None:
            nonlocal grown
            grown += 1
            if grown == 2:
                (pid,) = [pid for pid, title in kept.processes().items() if "scheduler" in title]
                os.kill(pid, signal.SIGSTOP)

        (group,) = engine.generate(LONG, progress)
        assert [len(sample.tokens) for sample in group] == [450] * 4
        assert engine.losses == 1


def test_without_a_server_it_gives_up_and_blames_no_row(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept, patience=0.5) as engine:
        engine._find = lambda: None
        with pytest.raises(ActorError, match="no inference server"):
            engine.load(3, *shards(kept, tmp_path))


def test_what_the_server_refuses_is_told_in_its_words(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        with pytest.raises(EngineError, match="refuses a row"):
            engine.generate([request("12>", 1, temperature=-1.0)], nothing)
        assert len(engine.generate(REQUESTS, nothing)) == 3


def test_with_seeds_a_row_gives_the_same_bits_again_whatever_happened_to_its_server(
    exact: Kept, tmp_path: Path
) -> None:
    one = [request("12>", 1, samples=6, max_tokens=200, stop_ids=frozenset([STOP]))]
    found = []
    for disturbed in (False, False, True):
        with engine_of(exact, keeps_partial=False, rows=1) as engine:
            engine.load(3, *shards(exact, tmp_path))
            killed = False

            def disturb() -> None:
                nonlocal killed
                if not killed:
                    killed = True
                    exact.kill("scheduler")

            (group,) = engine.generate(one, disturb if disturbed else nothing)
            found.append(group)
            if not disturbed:
                # Another row in between changes nothing.
                engine.generate([request("9081>", 2)], nothing)
    for group in found[1:]:
        for a, b in zip(found[0], group, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert len({tuple(sample.tokens.tolist()) for sample in found[0]}) == 6


def test_a_model_with_experts_gives_the_same_log_probs_and_tells_the_experts(tmp_path: Path) -> None:
    kept = Kept(config_of(tmp_path / "run", MOE, trainer={"router_replay": True}))
    model = build(kept.config.model_path)
    copy_into(model, tensors(kept), "test")
    routers = Routers(model)
    try:
        with engine_of(kept, moe=measure(kept.config.model_path).moe) as engine:
            engine.load(3, *shards(kept, tmp_path))
            made = pairs(REQUESTS, engine.generate(REQUESTS, nothing))
            check_logprobs(kept, made, {3: 1.0}, 5e-5)
    finally:
        kept.close()
    for request, sample in made:
        chosen: list[torch.Tensor] = []
        sequence = torch.tensor([[*request.tokens.tolist(), *sample.tokens.tolist()]])[:, :-1]
        with torch.no_grad(), routers.recording(chosen):
            model(sequence)
        expected = torch.stack(chosen, 1).view(sequence.shape[1], len(chosen), -1).numpy()
        assert sample.routed_experts is not None
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(expected, -1))


def test_nothing_is_left_of_a_server_whose_keeper_and_supervisor_are_killed(tmp_path: Path) -> None:
    def left() -> set[Path]:
        return {*Path(SHARED_MEMORY).glob("s*"), *Path(tempfile.gettempdir()).glob("relax-sglang-*")}

    before = left()
    config_of(tmp_path / "run", DENSE)
    script = (
        "import json, sys, time, pathlib\n"
        "from tests.support.sglang_servers import Kept\n"
        "from relax_actors.runtime.run_folder import RunFolder\n"
        "kept = Kept(RunFolder(pathlib.Path(sys.argv[1])).load_config())\n"
        "print(json.dumps(kept.record.group), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        group = json.loads(supervisor.stdout.readline())
        assert len(members(group)) >= 4
        assert len(left() - before) >= 2
        supervisor.kill()
    wait_until(lambda: not members(group), "end of the server")
    wait_until(lambda: left() <= before, "clean-up")
