"""Any bytes decode to a value or raise a declared error; monitors show or ignore them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import MAX_REFERENCES, decode, decode_fields, encode, open_envelope, plain_value
from broker.errors import CodecError, StoreError, SubjectError
from broker.fields import TensorRef
from broker.store import Store
from broker.subjects import RowId, Subjects
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.config import validate
from relax_actors.messages import Advantage, Batch, Trajectory
from relax_actors.monitoring.live_view import LiveView
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import Progress
from relax_actors.monitoring.render import fields_of, readable
from relax_actors.monitoring.screen import Screen
from relax_actors.printable import printable_lines
from relax_actors.roles import numbered_cells
from relax_actors.runtime import COLUMNS
from relax_actors.runtime.journal import MAX_ITEMS, MAX_TEXT, RateLimiter, truncate
from relax_actors.training.validation import RowValidator
from tests.support.fuzzing import Fuzzer, samples
from tests.support.log_messages import metric

SEEDS = st.integers(0, 2**32)
READ_AS = COLUMNS | numbered_cells()
SUBJECT = "relax.x.batch.3"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Store with the segment that some of the fuzzed references name."""
    store = Store(tmp_path_factory.mktemp("store"))
    segment = store.segment_writer(RowId(0, 0), "trajectory", "rollout.0#1")
    segment.place(np.zeros(9000))
    segment.close()
    return store


@given(seed=SEEDS, name=st.sampled_from(list(READ_AS)))
def test_fuzzed_cell_is_decoded_or_refused(store: Store, seed: int, name: str) -> None:
    data = Fuzzer("x", seed).content(name)
    try:
        value = decode_fields(open_envelope(data, store.read), READ_AS[name])
    except (CodecError, StoreError):
        return
    assert type(value) is READ_AS[name]
    assert decode(encode(value, "a"), READ_AS[name]) is not None


@given(data=st.binary(max_size=200) | SEEDS.map(lambda seed: Fuzzer("x", seed).content("looked")))
def test_any_bytes_are_plain_data_or_refused(store: Store, data: bytes) -> None:
    try:
        plain_value(open_envelope(data, store.read))
    except (CodecError, StoreError):
        return


@given(data=st.binary(max_size=300) | SEEDS.map(lambda seed: Fuzzer("x", seed).content("batch")))
def test_bytes_without_the_checksum_of_the_subject_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match=r"the checksum of cell relax\.x\.batch\.3"):
        open_envelope(data, subject=SUBJECT)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_numbered_cell_with_a_flipped_bit_is_refused(place: int, bit: int) -> None:
    data = bytearray(encode(samples()["batch"], "trainer.0#1", subject=SUBJECT))
    assert decode_fields(open_envelope(bytes(data), subject=SUBJECT), Batch) == samples()["batch"]
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(CodecError):
        open_envelope(bytes(data), subject=SUBJECT)


def test_numbered_cell_of_another_subject_is_refused() -> None:
    data = encode(samples()["batch"], "trainer.0#1", subject=SUBJECT)
    assert decode(data, Batch) == samples()["batch"]  # monitors decode without the subject
    with pytest.raises(CodecError, match="checksum"):
        open_envelope(data, subject="relax.x.batch.4")


def test_number_of_references_is_limited() -> None:
    reference = TensorRef("a", 0, 4, "int32", (1,), "0")
    data = encode([np.zeros(1, np.int32)] * (MAX_REFERENCES + 1), "a", lambda _: reference)
    with pytest.raises(CodecError, match=f"at most {MAX_REFERENCES} arrays"):
        open_envelope(data)


@given(SEEDS)
def test_fuzzed_subject_is_parsed_or_refused(seed: int) -> None:
    subject = Fuzzer("x", seed).message().subject
    try:
        cell = Subjects("x").parse(subject)
    except SubjectError:
        return
    assert 0 <= cell.step < 10**18


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> RowValidator:
    folder = tmp_path_factory.mktemp("model")
    body = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    body |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 13, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(body | {"model_type": "llama"}))
    return RowValidator(
        validate({"model": {"path": str(folder)}, "data": {"kind": "jsonl"}, "rollout": {"max_tokens": 6}}, "t")
    )


NUMBERS = st.sampled_from([0, 1, 5, -1, 12, 13, 2**31 - 1])


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    lengths = draw(st.lists(st.integers(0, 3) | st.just(70), min_size=1, max_size=3).filter(any))
    total = sum(lengths)

    def integers(size: int) -> Any:
        return np.array(draw(st.just(1) | NUMBERS) * np.ones(size), np.int64)

    return Trajectory(
        prompt_tokens=integers(draw(st.integers(1, 3))),
        lengths=np.array(lengths, np.int32),
        token_ids=integers(total),
        logprobs=np.full(total, draw(st.just(-1.0) | st.floats(width=32) | st.just(-1e300)), np.float64),
        versions=np.abs(integers(total)),
        texts=["x"] * len(lengths),
        finish_reasons=["stop"] * len(lengths),
    )


@given(trajectories(), st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=3))
def test_valid_row_has_numbers_that_engines_accept(
    limits: RowValidator, trajectory: Trajectory, values: list[float]
) -> None:
    advantage = Advantage(np.array(values), 0.5)
    if limits.of_row(trajectory, advantage, 5):
        return
    assert len(values) in (len(trajectory.lengths), len(trajectory.token_ids))
    assert np.isfinite(trajectory.logprobs.astype(np.float32)).all()
    assert trajectory.token_ids.min() >= 0
    assert trajectory.token_ids.max() < 13
    assert trajectory.versions.max() <= 5
    lengths = [len(trajectory.prompt_tokens) + int(n) for n in trajectory.lengths]
    assert micro_batches(lengths, max_tokens=8192)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"advantage": [1.0]}, "1 advantages for 2 samples"),
        ({"advantage": [1.0, 1e9]}, "an advantage is over 1e"),
        ({"prompt_tokens": np.ones(62, np.int32)}, "a sequence has 65 tokens"),
        ({"token_ids": np.array([1, 2, 13, 3, 4], np.int32)}, "samples' tokens are not all in the model's vocabulary"),
        ({"prompt_tokens": np.array([-1], np.int32)}, "prompt's tokens are not all in the model's vocabulary"),
        ({"logprobs": np.array([-1, np.nan, -1, -1, -1], np.float32)}, "a log-prob is positive or not finite"),
        ({"logprobs": np.array([-1, -np.inf, -1, -1, -1], np.float32)}, "a log-prob is positive or not finite"),
        ({"logprobs": np.full(5, -1e300)}, "a log-prob is positive or not finite"),
        ({"versions": np.array([0, 0, 0, 0, 6], np.int32), "fingerprints": []}, "not from 0 to 5"),
    ],
)
def test_invalid_row_has_a_reason(limits: RowValidator, change: dict[str, Any], why: str) -> None:
    good = samples()["trajectory"]
    assert limits.of_row(good, samples()["advantage"], 5) == ""
    advantage = Advantage(np.array(change.pop("advantage", [1.0, -1.0])), 0.5)
    fields = {name: getattr(good, name) for name in Trajectory.__dataclass_fields__}
    fields |= {"prompt_experts": None, "routed_experts": None, "shared_lengths": None}
    assert why in limits.of_row(Trajectory(**(fields | change)), advantage, 5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"prompt_experts": None, "routed_experts": None}, "has not recorded experts"),
        (
            {"prompt_experts": np.zeros((1, 2, 2, 2), np.uint8), "routed_experts": np.zeros((5, 2, 2), np.uint8)},
            "experts have shape [5, 2, 2], not 1 layers with 2 per token",
        ),
        ({"routed_experts": np.full((5, 1, 2), 4, np.uint8)}, "an expert is not from 0 to 3"),
        ({"prompt_experts": np.full((1, 2, 1, 2), 1, np.int16)}, "an expert is chosen twice"),
        ({"prompt_experts": np.full((1, 2, 1, 2), [0, -1], np.int16)}, "only some of its experts"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    body = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    body |= {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 13, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(body | {"model_type": "qwen3_moe"}))
    tree = {"model": {"path": str(tmp_path)}, "data": {"kind": "jsonl"}, "rollout": {"max_tokens": 6}}
    limits = RowValidator(validate(tree | {"trainer": {"router_replay": True}}, "t"))
    good = samples()["trajectory"]
    fields = {name: getattr(good, name) for name in Trajectory.__dataclass_fields__}
    found = limits.of_trajectory(Trajectory(**(fields | change)), 5)
    assert (why in found) if why else found == ""
    assert RowValidator(validate(tree, "t")).of_trajectory(Trajectory(**(fields | change)), 5) == ""


@given(st.lists(SEEDS, max_size=30))
def test_live_view_survives_any_event_and_metric(seeds: list[int]) -> None:
    progress = Progress("x", 100)
    for seed in seeds:
        message = Fuzzer("x", seed)._log()
        if (read := LogMessage.parse(message.subject, message.data)) is not None:
            progress.take(read)
    screen = Screen(width=100)
    with screen.capture() as captured:
        screen.print(LiveView(progress))
    assert printable_lines(captured.get()) == captured.get()
    assert progress.line().startswith("step ")
    assert 0 <= progress.step <= 100


def test_live_view_ignores_malformed_metrics() -> None:
    progress = Progress("x", 100)
    good = {"kind": "step", "step": 7, "reward": 0.5, "time": 3.0, "staleness": 1}
    progress.take(metric("trainer", **good))
    for bad in ({"step": 100}, {"step": -1}, {"reward": float("nan")}, {"time": "x"}, {"reward": 1e300}):
        progress.take(metric("trainer", **(good | bad)))
    for restarts in ({"a.0": 1}, [1], {"a.0": "many"}, 3):
        progress.take(metric("node", kind="supervision", restarts=restarts))
    assert (progress.step, progress.value, progress.restarts) == (8, 0.5, 1)
    assert "staleness 1" in progress.line()


@given(st.binary(max_size=200) | SEEDS.map(lambda seed: Fuzzer("x", seed).message().data))
def test_any_message_is_rendered_as_text(data: bytes) -> None:
    assert isinstance(readable(data), str)
    assert isinstance(fields_of(data), str)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_nesting_is_rendered_as_bytes(data: bytes) -> None:
    assert "bytes: " in readable(data)


def test_events_above_the_rate_limit_are_counted() -> None:
    limiter = RateLimiter(burst=3, rate=2.0)
    assert [limiter.admit("a", 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limiter.admit("b", 0.0)
    assert [limiter.admit("a", 0.5), limiter.admit("a", 0.6)] == [True, False]
    assert limiter.refused("a") == 3
    assert limiter.refused("a") == 0
    assert [limiter.admit("a", 100.0) for _ in range(4)] == [True] * 3 + [False]


@given(st.lists(st.floats(0, 100), max_size=200), st.integers(1, 5), st.floats(0.1, 10))
def test_burst_and_rate_limit_the_number_of_events(times: list[float], burst: int, rate: float) -> None:
    limiter = RateLimiter(burst, rate)
    passed = sum(limiter.admit("a", at) for at in sorted(times))
    assert passed <= burst + rate * max(times, default=0.0) + 1e-6
    assert passed + limiter.refused("a") == len(times)


def test_long_text_keeps_its_beginning_and_end() -> None:
    cut = truncate("a" * MAX_TEXT + "b" * MAX_TEXT)
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    assert f"{MAX_TEXT} characters left out" in cut
    assert len(cut) < MAX_TEXT + 100
    assert truncate("short") == "short"
    assert truncate(list(range(MAX_ITEMS + 5)))[-1] == "and 5 more"


def test_file_outside_the_store_is_not_read(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(b"abcd")
    for uri in (str(outside), f"../../{outside}"):
        with pytest.raises(StoreError):
            store.read(TensorRef(uri, 0, 4, "uint8", (4,), "0"))
