"""What every role stands on: options, rows, seeds, the tokenizer and the facts of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode
from broker.errors import CodecError
from broker.store import Store
from broker.subjects import RowId
from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.data.tokenizer import Tokenizer, make_character_tokenizer
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import FinishReason, Prompt, Reward, Trajectory
from relax_actors.runtime.pump import waking
from relax_actors.runtime.role import COLUMNS, Role, Row, StatefulRole, check_role
from relax_actors.runtime.seeds import seed_of, task_index


class LengthPenalty(Role):
    """Takes a little reward from every token beyond a budget."""

    reads = ("trajectory", "reward")
    writes = "shaped_reward"

    budget: int = 256

    def handle(self, row: Row) -> list[float]:
        """The rewards of the row's samples, less the penalty."""
        lengths = [len(s.tokens) for s in row.trajectory.samples]
        return [r - 0.01 * max(0, n - self.budget) for r, n in zip(row.reward, lengths, strict=True)]


class Demanding(LengthPenalty):
    """A role with an option that has no default."""

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
        fingerprint="f",
    )


def make_row(store: Store, row: RowId = RowId(1, 2), **columns: Any) -> Row:
    return Row(row, {name: encode(value, "test.0#1") for name, value in columns.items()}, store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_the_first_role_of_the_documentation_works(store: Store) -> None:
    role = LengthPenalty.build({"budget": 1}, "roles.length_penalty")
    row = make_row(store, trajectory=trajectory(), reward=Reward(np.array([1.0, 0.5, 0.0], np.float32)))
    assert role.handle(row) == pytest.approx([0.99, 0.5, -0.02])
    assert role.handle_many([row, row]) == [role.handle(row)] * 2
    assert check_role(LengthPenalty, "roles.length_penalty.actor") is LengthPenalty


def test_options_are_the_annotated_attributes_of_the_class_and_its_bases() -> None:
    assert Role.options() == {}
    assert LengthPenalty.options() == {"budget": (int, 256)}
    assert Demanding.options().keys() == {"budget", "word", "table"}


def test_defaults_hold_and_are_not_shared() -> None:
    assert LengthPenalty.build({}, "roles.x").budget == 256  # type: ignore[attr-defined]
    first, second = (Demanding.build({"word": "w"}, "roles.x") for _ in range(2))
    first.table["x"] = 1.0  # type: ignore[attr-defined]
    assert second.table == {}  # type: ignore[attr-defined]
    assert Demanding.table == {}


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"word": "w", "budgte": 3}, r"roles\.x\.budgte: Extra inputs are not permitted; Demanding takes .*'budget'"),
        ({"word": "w", "budget": "lots"}, r"roles\.x\.budget: Input should be a valid integer"),
        ({"word": "w", "budget": 1.5}, r"roles\.x\.budget: Input should be a valid integer"),
        ({}, r"roles\.x\.word: Field required; Demanding takes \['budget', 'table', 'word'\]"),
        ({"word": "w", "table": {"a": "b"}}, r"roles\.x\.table\.a: Input should be a valid number"),
        ({"word": "w", "_private": 3}, r"roles\.x\._private: Extra inputs are not permitted"),
        ({"word": "w", "reads": ["x"]}, r"roles\.x\.reads: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_option_is_named_with_those_there_are(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Demanding.build(given_options, "roles.x")


def test_every_wrong_option_gets_a_line() -> None:
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
    def inputs(self) -> tuple[str, ...]:
        return ("reward",)


class LooksOn(Role):
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
        (3, "roles.x.actor names 3, which is no subclass of relax_actors.Role"),
        (int, "no subclass of relax_actors.Role"),
        (LengthPenalty(), "no subclass of relax_actors.Role"),
        (ReadsNothing, r"roles\.x\.actor: ReadsNothing reads no column; set `reads`, e\.g\. reads = \('trajectory',\)"),
        (WritesWhatItReads, "writes 'reward', which it cannot; choose a column of its own"),
        (Drops, "writes 'dropped', which it cannot"),
        (HasNoHandle, r"roles\.x\.actor: HasNoHandle has no handle\(row\)"),
    ],
)
def test_a_class_that_is_no_role_is_refused_with_the_remedy(cls: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_role(cls, "roles.x.actor")


@pytest.mark.parametrize("cls", [LengthPenalty, ReadsByOption, LooksOn, HandlesMany, StatefulRole])
def test_a_usable_class_is_a_role(cls: type[Role]) -> None:
    assert check_role(cls, "roles.x.actor") is cls


def test_a_row_gives_built_in_columns_as_their_classes_and_others_as_plain_data(store: Store) -> None:
    row = make_row(store, RowId(3, 4, "eval"), reward=Reward(np.array([1.0])), shaped=[1, {"a": np.arange(2)}])
    assert row.is_eval
    assert list(row.reward) == [1.0]
    assert row.shaped[0] == 1
    assert row.shaped[1]["a"].tolist() == [0, 1]
    assert row.reward is row.reward
    assert not make_row(store).is_eval


def test_a_column_that_the_role_does_not_read_is_named_with_the_remedy(store: Store) -> None:
    row = make_row(store, reward=Reward(np.zeros(1)))
    with pytest.raises(AttributeError, match=r"row group\.1\.2 has no column 'trajectory' here.*\['reward'\].*`reads`"):
        _ = row.trajectory
    assert not hasattr(row, "_anything")
    with pytest.raises(KeyError):
        row.column("trajectory")


def test_a_column_of_another_type_is_a_codec_error(store: Store) -> None:
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


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (("prompt",), ["prompt"]),
        (("trajectory",), ["trajectory"]),
        (("prompt", "trajectory"), ["trajectory"]),
        (("trajectory", "reward"), ["reward"]),
        (("reward", "trajectory", "prompt"), ["reward"]),
        (("trajectory", "reward", "advantage"), ["advantage"]),
        (("prompt", "own"), ["own"]),
        (("trajectory", "own"), ["trajectory", "own"]),
        (("reward", "own", "other"), ["reward", "own", "other"]),
    ],
)
def test_a_row_is_woken_by_the_columns_that_no_other_implies(inputs: tuple[str, ...], expected: list[str]) -> None:
    assert waking(inputs) == expected


@given(st.sets(st.sampled_from([*COLUMNS, "own", "other"]), min_size=1))
def test_something_always_wakes_a_row(inputs: set[str]) -> None:
    assert set(waking(tuple(inputs))) <= inputs
    assert waking(tuple(inputs))


@given(st.integers(0, 2**31 - 1), st.integers(1, 9), st.integers(1, 40), st.integers(0, 3))
def test_each_task_is_visited_once_an_epoch(seed: int, rows: int, size: int, epoch: int) -> None:
    places = [divmod(place, rows) for place in range(epoch * size, (epoch + 1) * size)]
    assert sorted(task_index(seed, RowId(*place), rows, size) for place in places) == list(range(size))


def test_epochs_and_runs_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(task_index(seed, RowId(epoch * 8 + step, i), 8, 64) for step in range(8) for i in range(8))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@given(
    st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 10**9)
)
def test_a_successor_gets_one_of_the_tasks_and_always_the_same(
    seed: int, step: int, rows: int, beyond: int, size: int
) -> None:
    row = RowId(step, rows + beyond)
    found = task_index(seed, row, rows, size)
    assert 0 <= found < size
    assert task_index(seed, row, rows, size) == found


def test_seeds_are_known_numbers_of_63_bits_and_differ_by_every_part() -> None:
    assert seed_of(1, "row", 2, 3) == seed_of(1, "row", 2, 3)
    seeds = {seed_of(run, kind, step, i) for run in range(4) for kind in "ab" for step in range(20) for i in range(20)}
    assert len(seeds) == 4 * 2 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "row", 12, 3) != seed_of(1, "row", 1, 23)


def test_seeds_do_not_change_from_release_to_release() -> None:
    assert seed_of(0, "row", 0, 0) == 8737435638203586162
    assert [task_index(7, RowId(0, i), 4, 10) for i in range(4)] == [0, 8, 3, 6]


ALPHABET = "0123456789>#\n é数🙂"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    ids = make_character_tokenizer(ALPHABET, "#", folder)
    (folder / "config.json").write_text(json.dumps(ids))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@given(st.text(ALPHABET.replace("#", "")))
def test_characters_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [ALPHABET.index(c) for c in text]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text


def test_decoding_leaves_the_end_and_the_padding_out(tokenizer: Tokenizer) -> None:
    end, pad = ALPHABET.index("#"), len(ALPHABET)
    assert tokenizer.stop_ids == {end}
    assert tokenizer.decode([1, 2, end, pad, pad]) == "12"
    assert tokenizer.size == len(ALPHABET) + 1


@pytest.mark.parametrize("text", ["x", "12x", "X>", "<unknown>", "\t", "\0"])
def test_an_unknown_character_is_an_error_of_the_row(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RowError, match="cannot be tokenized"):
        tokenizer.encode(text)


def test_a_text_of_one_token_has_an_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id(">") == ALPHABET.index(">")
    assert tokenizer.token_id("12") is None


@pytest.mark.parametrize(("alphabet", "end"), [("aab", "b"), ("ab", "c"), ("ab", ""), ("ab", "ab"), ("", "")])
def test_an_alphabet_that_contradicts_itself_is_refused(tmp_path: Path, alphabet: str, end: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.(alphabet|end)"):
        make_character_tokenizer(alphabet, end, tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must hold a Hugging Face tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        Tokenizer(tmp_path)


def test_stop_ids_come_from_both_files(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert Tokenizer(tmp_path).stop_ids == {3, 4, 5}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer(tmp_path).stop_ids == frozenset()


BODY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 21,
    "max_position_embeddings": 77,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_parameters_are_counted_as_the_model_has_them(tmp_path: Path, model_type: str, tied: bool) -> None:  # noqa: FBT001
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": model_type, "tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    facts = measure(tmp_path)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert (facts.context_length, facts.vocabulary, facts.model_type) == (77, 21, model_type)


def test_parameters_of_stored_weights_are_read_from_their_headers(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": "llama"}))
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(5, np.float32)}, tmp_path / "model-2.safetensors")
    assert measure(tmp_path).parameters == 17


@pytest.mark.parametrize("text", ["{}", "x", '{"max_position_embeddings": "many"}', '{"vocab_size": 3}'])
def test_a_folder_whose_config_is_no_models_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is no config of a language model"):
        measure(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no model folder: it has no config\.json"):
        measure(tmp_path / "none")


def run_config(**sections: Any) -> Config:
    body = {"model": {"path": "m"}, "data": {"kind": "jsonl"}}
    return validate(body | sections, "test")


def test_an_architecture_is_written_as_a_folder_that_can_be_measured(tmp_path: Path) -> None:
    body = {key: value for key, value in BODY.items() if key != "vocab_size"} | {"model_type": "llama"}
    model = {"architecture": body, "tokenizer": {"alphabet": "01#"}}
    prepare(run_config(model=model), tmp_path / "model")
    assert measure(tmp_path / "model").vocabulary == 4
    assert Tokenizer(tmp_path / "model").stop_ids == {2}
    before = (tmp_path / "model" / "config.json").read_bytes()
    prepare(run_config(model=model), tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    small = {"architecture": body | {"vocab_size": 2}, "tokenizer": {"alphabet": "01#"}}
    with pytest.raises(
        ConfigError, match=r"model\.architecture\.vocab_size is 2, the tokenizer has 4 ids; leave it out"
    ):
        prepare(run_config(model=small), tmp_path / "small")


def test_a_folder_of_the_users_is_not_touched(tmp_path: Path) -> None:
    prepare(run_config(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 10]), (4, [0, 4, 8, 10]), (5, [0, 5, 10]), (99, [0, 10])])
def test_the_first_every_so_many_and_the_last_version_are_evaluated(every: int, expected: list[int]) -> None:
    config = run_config(run={"steps": 10}, eval={"every": every, "data": {"kind": "jsonl"}})
    assert [version for version in range(11) if is_evaluated(config, version)] == expected


def test_without_a_section_nothing_is_evaluated() -> None:
    assert not any(is_evaluated(run_config(), version) for version in range(200))


def test_prompt_is_a_column() -> None:
    assert COLUMNS["prompt"] is Prompt
