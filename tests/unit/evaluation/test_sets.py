"""The section [eval] with one set and with several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.config import Config, load_config, validate
from relax_actors.errors import ConfigError, RowError
from relax_actors.generation.sampling import Sampling, sampling_of

DATA = {"kind": "jsonl", "path": "held_out.jsonl"}


def run_config(held_out: dict[str, Any], **sections: Any) -> Config:
    return validate({"model": {"path": "m"}, "data": {"kind": "jsonl"}, "eval": held_out} | sections, "test")


def test_a_section_without_sets_is_the_set_held_out() -> None:
    section = run_config({"rows": 3, "data": DATA}).eval
    assert section is not None
    assert list(section.named) == ["held_out"]
    assert (section.total_rows, section.place(2)[2]) == (3, 2)
    with pytest.raises(RowError, match="row 3 of an evaluation belongs to no set"):
        section.place(3)


def test_sets_take_what_they_leave_out_from_the_section() -> None:
    own = {"kind": "python", "function": "tasks.make"}
    section = run_config(
        {"rows": 2, "reward": "numeric_match", "data": DATA, "sets": {"a": {}, "b": {"rows": 5, "data": own}}}
    ).eval
    assert section is not None
    a, b = section.named["a"], section.named["b"]
    assert (a.rows, a.reward, a.source.kind) == (2, "numeric_match", "jsonl")
    assert (b.rows, b.reward, b.source.kind) == (5, "numeric_match", "python")
    assert [section.place(index)[::2] for index in (0, 1, 2, 6)] == [("a", 0), ("a", 1), ("b", 0), ("b", 4)]


def test_a_saved_configuration_gives_the_same_sets() -> None:
    config = run_config({"rows": 2, "data": DATA, "sets": {"a": {}, "b": {"samples": 4, "temperature": 0.5}}})
    assert validate(config.model_dump(mode="json"), "saved") == config


def test_rows_are_sampled_as_their_set_says() -> None:
    config = run_config(
        {"rows": 1, "data": DATA, "sets": {"a": {}, "b": {"samples": 4, "temperature": 0.5, "max_tokens": 8}}},
        rollout={"group_size": 3, "max_tokens": 16, "temperature": 0.7},
    )
    assert sampling_of(config, RowId(0, 0, "eval")) == Sampling(1, 1, 0.7, 1.0, 16)
    assert sampling_of(config, RowId(9, 1, "eval")) == Sampling(4, 0, 0.5, 1.0, 8)
    assert sampling_of(config, RowId(0, 0), baselines=1) == Sampling(4, 1, 0.7, 1.0, 16)
    assert config.most_samples == 4


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ({"data": DATA, "samples": 2}, "2 equal answers; set a temperature"),
        ({"data": DATA, "samples": 4, "temperature": 1.0, "k": [8]}, "k = 8 needs 8 answers .* samples = 4"),
        ({"data": DATA, "max_tokens": 65}, r"eval.max_tokens = 65 is more than rollout.max_tokens = 64"),
        ({"sets": {"a": {"rows": 1}}}, r"eval.sets.a.data: is missing; add it"),
        ({"sets": {"a b": {"data": DATA}}}, "name of a set"),
        ({"sets": {"a": {"data": DATA, "rowz": 1}}}, r"eval.sets.a.rowz: unknown key; did you mean 'rows'"),
    ],
)
def test_mistakes_in_sets_are_named_with_their_remedy(held_out: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(held_out)


def test_sampling_has_no_effect_where_rows_come_from_data() -> None:
    with pytest.raises(ConfigError, match=r"eval.samples = 2 has no effect"):
        run_config({"data": DATA, "samples": 2, "temperature": 1.0}, algorithm={"name": "sft"})


def test_files_of_sets_are_relative_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\nkind = "jsonl"\n'
        '[eval.data]\nkind = "jsonl"\npath = "a.jsonl"\n[eval.sets.one]\n'
        '[eval.sets.two.data]\nkind = "jsonl"\npath = "b.jsonl"\n'
    )
    section = load_config(path).eval
    assert section is not None
    assert [each.source.path for each in section.named.values()] == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
