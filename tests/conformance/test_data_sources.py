"""Every kind of data source yields the same tasks again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.data.sources import open_source
from relax_actors.errors import ConfigError
from tests.conformance.base.data_source import SIZE, DataSourceConformance, MalformedRows, NeedsPackage
from tests.support.data_files import ROWS, arrow_of, jsonl_of, module_of, parquet_of
from tests.support.traces import trace_of, write_traces

EMPTY = {**ROWS[2], "prompt": None}


class TestJsonLines(DataSourceConformance, MalformedRows):
    implements = "jsonl"
    required, where = "path", r"rows\.jsonl line 3"

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": jsonl_of(tmp_path, *ROWS)}

    @pytest.fixture
    def malformed(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": jsonl_of(tmp_path, ROWS[0], ROWS[1], b'{"prompt": "cut', ROWS[3])}

    @pytest.fixture
    def hopeless(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": jsonl_of(tmp_path, *[EMPTY] * 5)}


class TestParquet(DataSourceConformance, MalformedRows, NeedsPackage):
    implements = "parquet"
    required, where = "path", r"rows\.parquet row 3"
    package, extra = "pyarrow", "parquet"

    @pytest.fixture(params=[1, 3, 100])
    def settings(self, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"path": parquet_of(tmp_path, ROWS, request.param)}

    @pytest.fixture
    def malformed(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": parquet_of(tmp_path, [ROWS[0], ROWS[1], EMPTY, ROWS[3]])}

    @pytest.fixture
    def hopeless(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": parquet_of(tmp_path, [*ROWS[:1], EMPTY, EMPTY][1:])}


class TestArrow(DataSourceConformance, MalformedRows, NeedsPackage):
    implements = "arrow"
    required, where = "path", r"rows\.arrow row 3"
    package, extra = "pyarrow", "parquet"

    @pytest.fixture(params=["stream", "file"])
    def settings(self, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"path": arrow_of(tmp_path, ROWS, request.param)}

    @pytest.fixture
    def malformed(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": arrow_of(tmp_path, [ROWS[0], ROWS[1], EMPTY, ROWS[3]])}

    @pytest.fixture
    def hopeless(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": arrow_of(tmp_path, [*ROWS[:1], EMPTY, EMPTY][1:])}


class TestMixture(DataSourceConformance, MalformedRows):
    """A mixture of two halves of a file; its metadata names the source."""

    implements = "mixture"
    required, where = "mixture", r"rows\.jsonl line 3"

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return self.halves(jsonl_of(tmp_path, *ROWS))

    @pytest.fixture
    def malformed(self, tmp_path: Path) -> dict[str, Any]:
        return self.halves(jsonl_of(tmp_path, ROWS[0], ROWS[1], b'{"prompt": "cut', ROWS[3]))

    @pytest.fixture
    def hopeless(self, tmp_path: Path) -> dict[str, Any]:
        return self.halves(jsonl_of(tmp_path, *[EMPTY] * 5))

    def test_a_size_takes_the_first_items(self, source: Any, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"data\.size .* belong to a source of the mixture"):
            open_source("mixture", **settings, size=4)
        assert len(source) == SIZE

    @staticmethod
    def halves(path: Path) -> dict[str, Any]:
        slices = {"first": "0%:40%", "second": "40%:"}
        return {"mixture": {name: {"kind": "jsonl", "path": str(path), "rows": rows} for name, rows in slices.items()}}


class TestReasoningGym(DataSourceConformance, NeedsPackage):
    implements = "reasoning_gym"
    required = "task"
    package, extra = "reasoning_gym", "tasks"

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"task": "chain_sum", "size": SIZE, "seed": 7, "options": {"max_terms": 3}}


class TestTraces(DataSourceConformance):
    implements = "traces"
    required = "path"

    @pytest.fixture(params=["traces.jsonl", "traces.parquet"])
    def settings(self, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
        path = tmp_path / request.param
        write_traces(path, "parquet" if path.suffix == ".parquet" else "verifiers", map(trace_of, range(SIZE)))
        return {"path": path}

    def test_rows_hold_their_traces(self, source: Any) -> None:
        assert [task.traces[0].prompt_tokens.tolist() for task in map(source.__getitem__, range(SIZE))] == [
            [1, number + 2] for number in range(SIZE)
        ]


class TestFunction(DataSourceConformance, MalformedRows):
    implements = "python"
    required, where = "function", "third_is_empty item 3"

    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.syspath_prepend(tmp_path)
        return module_of(tmp_path)

    @pytest.fixture
    def settings(self, module: str) -> dict[str, Any]:
        return {"function": f"{module}.sums", "size": SIZE, "seed": 5, "options": {"top": 2}}

    @pytest.fixture
    def malformed(self, module: str) -> dict[str, Any]:
        return {"function": f"{module}.third_is_empty"}

    @pytest.fixture
    def hopeless(self, module: str) -> dict[str, Any]:
        return {"function": f"{module}.numbers"}
