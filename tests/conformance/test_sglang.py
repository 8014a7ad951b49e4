"""The SGLang engine, on a real server, generates as the protocol says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from relax_actors.config import Config
from relax_actors.engines.sglang.engine import SglangEngine
from tests.conformance.base.inference_engine import LanguageModelConformance, RowsJoin
from tests.support.sglang_servers import DENSE, Kept, config_of, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": False}))
    yield kept
    kept.close()


class TestSglangEngine(LanguageModelConformance, RowsJoin):
    implements = "sglang"
    long = replace(LanguageModelConformance.long, max_tokens=450)

    @pytest.fixture
    def config(self, server: Kept) -> Config:
        return server.config

    @pytest.fixture
    def engine(self, server: Kept) -> Iterator[SglangEngine]:
        with engine_of(server) as engine:
            yield engine
