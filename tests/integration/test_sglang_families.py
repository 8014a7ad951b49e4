"""A real SGLang server gives the log-probs of transformers for each text family that the page of families marks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.conformance.base.inference_engine import pairs_of
from tests.support.batches import silent
from tests.support.models import check_logprobs, publish, random_weights, request_of
from tests.support.sglang_servers import Kept, config_of, engine_of, skip_if_missing
from tests.support.text_families import SGLANG

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REQUESTS = [request_of(text, seed, samples=4) for text, seed in (("12>", 1), ("9081>", 2))]


@pytest.mark.parametrize("name", SGLANG)
def test_server_gives_the_log_probs_of_transformers(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path / "run", SGLANG[name], run={"deterministic": False})
    with closing(Kept(config)) as kept, engine_of(kept) as engine:
        engine.load(1, *publish(random_weights(config), tmp_path / "published.safetensors"))
        made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        check_logprobs(config, made, {1: 1.0}, 1e-4)
