"""Suite of data sources: item i is the same task every time, in every thread and in every process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

SIZE = 10
PRINT = """
import json, sys
from relax_actors.data.sources import open_source
settings = json.loads(sys.argv[1])
source = open_source(settings.pop("kind"), **settings)
print(json.dumps([[task.prompt, task.answer, task.metadata] for task in map(source.__getitem__, range(len(source)))]))
"""
"""Prints the tasks of a source as JSON."""


def all_of(source: Any) -> list[Task]:
    """All items, in order."""
    return [source[i] for i in range(len(source))]


class DataSourceConformance:
    """Laws of every source; subclasses provide fixture `settings`, those of a source of `SIZE` tasks."""

    implements: str
    """Name in the registry."""
    required: str
    """The setting that the kind needs."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def source(self, settings: dict[str, Any]) -> Any:
        return open_source(self.implements, **settings)

    def test_every_item_is_a_task_of_plain_data(self, source: Any) -> None:
        assert len(source) == SIZE
        for task in all_of(source):
            assert isinstance(task, Task)
            assert task.prompt
            assert isinstance(task.answer, str)
            assert msgpack.unpackb(msgpack.packb(task.metadata)) == task.metadata

    def test_items_are_the_same_in_any_order_and_when_the_source_is_opened_again(
        self, source: Any, settings: dict[str, Any]
    ) -> None:
        expected = all_of(source)
        again = open_source(self.implements, **settings)
        for i in random.Random(1).sample(range(SIZE), SIZE):
            assert again[i] == expected[i]
        assert all_of(source) == expected

    def test_items_are_the_same_in_another_process(self, source: Any, settings: dict[str, Any], tmp_path: Path) -> None:
        given = {"kind": self.implements} | {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-c", PRINT, json.dumps(given)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = [Task(prompt, answer, metadata) for prompt, answer, metadata in json.loads(done.stdout)]
        assert found == [Task(task.prompt, task.answer, task.metadata) for task in all_of(source)]

    def test_threads_may_read_at_once(self, source: Any) -> None:
        expected = all_of(source)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(source.__getitem__, list(range(SIZE)) * 8))
        assert found == expected * 8

    @pytest.mark.parametrize("i", [-1, SIZE])
    def test_an_index_outside_the_source_is_an_index_error(self, source: Any, i: int) -> None:
        with pytest.raises(IndexError, match=f"item {i} of a source of {SIZE}"):
            source[i]

    def test_a_size_takes_the_first_items(self, source: Any, settings: dict[str, Any]) -> None:
        assert all_of(open_source(self.implements, **settings | {"size": 4})) == all_of(source)[:4]

    def test_a_size_of_zero_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"data.size = 0"):
            open_source(self.implements, **settings | {"size": 0})

    def test_the_setting_that_the_kind_needs_is_named(self) -> None:
        said = rf"^data.{self.required} is not set; data.kind = '{self.implements}' needs it"
        with pytest.raises(ConfigError, match=said):
            open_source(self.implements)


class MalformedRows:
    """Laws of sources whose rows may be malformed.

    Subclasses provide fixture `malformed`, settings of a source of four rows of which the third is malformed, and
    `hopeless`, of one that has no good row.
    """

    implements: str
    where: str
    """Names the third row in an error."""

    @pytest.fixture
    def malformed(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def hopeless(self) -> dict[str, Any]:
        raise NotImplementedError

    def test_a_malformed_row_is_named_and_spares_the_others(self, malformed: dict[str, Any]) -> None:
        source = open_source(self.implements, **malformed)
        assert len(source) == 4
        with pytest.raises(RowError, match=self.where):
            source[2]
        assert all(isinstance(source[i], Task) for i in (0, 1, 3))

    def test_a_source_without_a_good_row_is_refused(self, hopeless: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"^data\.[\w.]+(:| =) .*not one of \d+ rows is "):
            open_source(self.implements, **hopeless)


class NeedsPackage:
    """Law of sources that need a package which may be missing."""

    implements: str
    package: str
    extra: str

    def test_a_missing_package_is_named_with_its_extra(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, self.package, None)  # Python's own way to mark a module as missing
        install = rf"pip install 'relax-actors\[{self.extra}\]'"
        said = rf"^data.kind = '{self.implements}' needs the package '{self.package}'; {install}"
        with pytest.raises(ConfigError, match=said):
            open_source(self.implements, **settings)
