"""Options, rows and checks of role classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from broker.codec import encode
from broker.errors import CodecError
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages import FinishReason, Prompt, Reward, Trajectory
from relax_actors.runtime import COLUMNS, Role, Row, StatefulRole, check_role


class LengthPenalty(Role):
    """Penalty for every token beyond a budget."""

    reads = ("trajectory", "reward")
    writes = "shaped_reward"

    budget: int = 256

    def handle(self, row: Row) -> list[float]:
        """Return the rewards of the row's samples minus the penalty."""
        lengths = [len(s.tokens) for s in row.trajectory.samples]
        return [r - 0.01 * max(0, n - self.budget) for r, n in zip(row.reward, lengths, strict=True)]


class Demanding(LengthPenalty):
    """Role with a required option."""

    writes = "demanded"
    kinds: ClassVar[tuple[str, ...]] = ("group", "eval")

    word: str
    table: dict[str, float] = {}  # noqa: RUF012 an option's default, copied
    _private: int = 3


def trajectory() -> Trajectory:
    return Trajectory(
        prompt_tokens=np.array([1], np.int32),
        lengths=np.array([2, 0, 3], np.int32),
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=-np.arange(5, dtype=np.float32),
        versions=np.array([1, 1, 2, 2, 3], np.int32),
        texts=["a", "b", "c"],
        finish_reasons=["stop", "abort", "length"],
        fingerprints=["f", "g", "h"],
    )


def make_row(store: Store, row: RowId = RowId(1, 2), **columns: Any) -> Row:
    return Row(row, {name: encode(value, "test.0#1") for name, value in columns.items()}, store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_role_of_the_documentation_works(store: Store) -> None:
    role = LengthPenalty.build({"budget": 1}, "roles.length_penalty")
    row = make_row(store, trajectory=trajectory(), reward=Reward(np.array([1.0, 0.5, 0.0], np.float32)))
    assert role.handle(row) == pytest.approx([0.99, 0.5, -0.02])
    assert role.handle_many([row, row]) == [role.handle(row)] * 2
    assert check_role(LengthPenalty, "roles.length_penalty.actor") is LengthPenalty


def test_options_are_annotated_attributes_of_the_class_and_its_bases() -> None:
    assert Role.options() == {}
    assert LengthPenalty.options() == {"budget": (int, 256)}
    assert Demanding.options().keys() == {"budget", "word", "table"}


def test_option_defaults_are_not_shared_between_instances() -> None:
    assert LengthPenalty.build({}, "roles.x").budget == 256  # type: ignore[attr-defined]
    first, second = (Demanding.build({"word": "w"}, "roles.x") for _ in range(2))
    first.table["x"] = 1.0  # type: ignore[attr-defined]
    assert second.table == {}  # type: ignore[attr-defined]
    assert Demanding.table == {}


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"word": "w", "budgte": 3}, r"^roles\.x\.budgte: unknown option of Demanding; did you mean 'budget'\?$"),
        ({"word": "w", "budget": "lots"}, r"roles\.x\.budget: Input should be a valid integer"),
        ({"word": "w", "budget": 1.5}, r"roles\.x\.budget: Input should be a valid integer"),
        ({}, r"^roles\.x\.word: is missing; Demanding has no default for it$"),
        ({"word": "w", "table": {"a": "b"}}, r"roles\.x\.table\.a: Input should be a valid number"),
        (
            {"word": "w", "_private": 3},
            r"^roles\.x\._private: unknown option of Demanding; known: budget, table, word$",
        ),
        ({"word": "w", "reads": ["x"]}, r"^roles\.x\.reads: unknown option of Demanding; known: budget, table, word$"),
    ],
)
def test_invalid_option_is_named_with_the_valid_ones(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Demanding.build(given_options, "roles.x")


def test_every_invalid_option_gets_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        Demanding.build({"budget": "lots", "budgte": 3}, "roles.x")
    assert len(str(caught.value).splitlines()) == 3


class ReadsNothing(Role):
    writes = "own"

    def handle(self, row: Row) -> int:  # noqa: ARG002 as every role's
        return 1


class WritesWhatItReads(LengthPenalty):
    writes = "reward"


class Drops(LengthPenalty):
    writes = "dropped"


class HasNoHandle(Role):
    reads = ("reward",)
    writes = "own"


class ReadsByOption(ReadsNothing):
    def inputs(self, config: Config) -> tuple[str, ...]:  # noqa: ARG002 as every role's
        return ("reward",)


class Observes(Role):
    reads = ("reward",)

    def handle(self, row: Row) -> None:  # noqa: ARG002 as every role's
        return None


class HandlesMany(Role):
    reads = ("reward",)
    writes = "own"

    def handle_many(self, rows: Any) -> list[Any]:
        return list(rows)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (3, "roles.x.actor names 3, which is not a subclass of relax_actors.Role"),
        (int, "not a subclass of relax_actors.Role"),
        (LengthPenalty(), "not a subclass of relax_actors.Role"),
        (ReadsNothing, r"roles\.x\.actor: ReadsNothing reads no column; set `reads`, e\.g\. reads = \('trajectory',\)"),
        (WritesWhatItReads, "cannot write column 'reward'; choose a column of its own"),
        (Drops, "cannot write column 'dropped'"),
        (
            HasNoHandle,
            r"roles\.x\.actor: HasNoHandle defines none of handle, handle_many, stream; define handle\(row\)",
        ),
    ],
)
def test_unusable_role_class_is_refused_with_a_remedy(cls: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_role(cls, "roles.x.actor")


@pytest.mark.parametrize("cls", [LengthPenalty, ReadsByOption, Observes, HandlesMany, StatefulRole])
def test_usable_role_class_is_accepted(cls: type[Role]) -> None:
    assert check_role(cls, "roles.x.actor") is cls


def test_row_decodes_built_in_columns_as_dataclasses_and_others_as_plain_data(store: Store) -> None:
    row = make_row(store, RowId(3, 4, "eval"), reward=Reward(np.array([1.0])), shaped=[1, {"a": np.arange(2)}])
    assert row.is_eval
    assert list(row.reward) == [1.0]
    assert row.shaped[0] == 1
    assert row.shaped[1]["a"].tolist() == [0, 1]
    assert row.reward is row.reward
    assert not make_row(store).is_eval


def test_column_that_the_role_does_not_read_is_named_with_a_remedy(store: Store) -> None:
    row = make_row(store, reward=Reward(np.zeros(1)))
    with pytest.raises(AttributeError, match=r"row group\.1\.2 has no column 'trajectory' here.*\['reward'\].*`reads`"):
        _ = row.trajectory
    assert not hasattr(row, "_anything")
    with pytest.raises(KeyError):
        row.column("trajectory")


def test_column_of_another_type_is_a_codec_error(store: Store) -> None:
    with pytest.raises(CodecError, match="cell holds a value, expected a Reward"):
        _ = make_row(store, reward=[1.0]).reward
    with pytest.raises(CodecError, match="cell holds a Prompt, expected plain data"):
        _ = make_row(store, shaped=Prompt("", np.zeros(1, np.int32), "", {}, 0, 0)).shaped


def test_own_column_may_hold_a_reward(store: Store) -> None:
    shaped = make_row(store, shaped=Reward(np.array([1.0, 2.0]), {"a": np.zeros(2)})).shaped
    assert list(shaped) == [1.0, 2.0]
    assert shaped.components["a"].tolist() == [0.0, 0.0]


def test_a_trajectory_is_cut_into_its_samples() -> None:
    samples = trajectory().samples
    assert [s.tokens.tolist() for s in samples] == [[0, 1], [], [2, 3, 4]]
    assert [s.versions.tolist() for s in samples] == [[1, 1], [], [2, 2, 3]]
    assert [s.text for s in samples] == ["a", "b", "c"]
    assert [s.finish_reason for s in samples] == [FinishReason.STOP, FinishReason.ABORT, FinishReason.LENGTH]


def test_prompt_is_a_column() -> None:
    assert COLUMNS["prompt"] is Prompt
