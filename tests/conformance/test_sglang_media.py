"""The SGLang engine, on a real server of each family, generates from prompts with media as transformers computes them.

Features reach the server by reference, and log-probs are of the distribution without the barred ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from relax_actors.errors import EngineError
from relax_actors.media.families import FAMILIES
from tests.support.batches import silent
from tests.support.sglang_media import ServedModel
from tests.support.sglang_servers import skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


SERVED = [name for name, spec in FAMILIES.items() if spec.sglang.architecture]


@pytest.fixture(scope="module", params=[*SERVED, "internvl qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    found = ServedModel(tmp_path_factory.mktemp("run"), request.param)
    yield found
    found.kept.close()


def test_log_probs_are_those_of_the_trainer_before_and_after_an_update(served: ServedModel) -> None:
    """Both times with the same media: after the update their embeddings are those of the new towers."""
    requests = served.requests
    with served.engine() as engine:
        engine.load(3, *served.publish(1.0))
        served.check(requests, engine.generate(requests, silent), {3: 1.0})
        engine.stage(4, served.weights(0.7))
        engine.swap()
        served.check(requests, engine.generate(requests, silent), {4: 0.7})


def test_running_samples_continue_with_the_new_towers(served: ServedModel) -> None:
    requests = [replace(request, max_tokens=80) for request in served.requests]
    grown = 0

    def progress() -> None:
        nonlocal grown
        grown += 1

    with served.engine() as engine:

        def refresh() -> bool:
            if grown < 2 or engine.version == 4:
                return False
            engine.stage(4, served.weights(0.7))
            return engine.swap() == 4

        engine.load(3, *served.publish(1.0))
        groups = engine.generate(requests, progress, refresh)
    versions = [{*made.versions.tolist()} for group in groups for made in group]
    assert {3, 4} in versions
    served.check(requests, groups, {3: 1.0, 4: 0.7}, 5e-5)


def test_a_prompt_whose_features_are_lost_or_changed_is_refused_by_name(served: ServedModel) -> None:
    lost, *others = [request for request in served.requests if request.media is not None and request.media.items]
    assert lost.media is not None
    item = lost.media.items[0]
    assert item.reference is not None
    file = served.store / item.reference.uri
    content = file.read_bytes()
    with served.engine() as engine:
        engine.load(3, *served.publish(1.0))
        try:
            file.write_bytes(content[:-1] + b"\0\1")
            with pytest.raises(EngineError, match=rf"features of {item.kind} at {file} have changed"):
                engine.generate([lost], silent)
            file.unlink()
            with pytest.raises(EngineError, match=rf"features of {item.kind} at {file} cannot be read: .*No such file"):
                engine.generate([lost], silent)
            served.check(others, engine.generate(others, silent), {3: 1.0})
            assert engine.losses == 0
        finally:
            file.write_bytes(content)


@pytest.mark.parametrize("served", ["qwen3_vl"], indirect=True)
def test_samples_with_media_continue_after_the_server_is_killed(served: ServedModel) -> None:
    requests = [replace(request, max_tokens=80) for request in served.requests]
    grown = 0

    def progress() -> None:
        nonlocal grown
        grown += 1
        if grown == 2:
            served.kept.kill("scheduler")

    with served.engine() as engine:
        engine.load(3, *served.publish(1.0))
        groups = engine.generate(requests, progress)
        assert engine.losses == 1
    served.check(requests, groups, {3: 1.0}, 5e-5)
