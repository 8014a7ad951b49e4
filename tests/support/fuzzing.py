"""Messages that no actor would write: random, mutated or misplaced, drawn from a seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from broker.codec import encode
from relax_actors import messages

COLUMNS = ("prompt", "trajectory", "reward", "advantage", "dropped", "quarantined", "requeued", "readmitted", "looked")
NUMBERED = ("batch", "weights", "checkpoint")
ROLES = ("prompts", "rollout", "reward", "advantages", "trainer", "evaluator", "node")
HUGE = (2**31, 2**53, 2**63 - 1, 2**64 - 1, 10**17, 4096, 77)
TEXTS = ("", "x", "\0", "\x1b[2J\x1b]0;x\x07", "é数🙂" * 30, "../../../etc/passwd", "[red]x[/]", "{}", "n" * 5000)

SCALARS = (None, True, 0, -1, *HUGE, -(2**63), float("nan"), float("inf"), -1e308, *TEXTS, b"\xff" * 9)


def samples() -> dict[str, Any]:
    """One valid message of every type."""
    tokens = np.array([1, 2, 11, 3, 4], np.int32)
    return {
        "prompt": messages.Prompt("12>", np.array([1, 2, 10], np.int32), "7", {"i": 3}, 5, 0),
        "trajectory": messages.Trajectory(
            prompt_tokens=np.array([1, 2, 10], np.int32),
            lengths=np.array([3, 2], np.int32),
            token_ids=tokens,
            logprobs=np.full(5, -1.5, np.float32),
            versions=np.zeros(5, np.int32),
            texts=["12", "34"],
            finish_reasons=["stop", "length"],
            fingerprints=["f" * 32],
            loss_mask=np.array([1, 1, 0, 1, 1], np.bool_),
            sequence_counts=np.array([1, 1], np.int32),
            shared_lengths=np.array([3, 3], np.int32),
            spans=np.array([[0, 1], [1, 3], [3, 5]], np.int32),
            metrics={"turns": [2.0, 1.0]},
            prompt_experts=np.array([[[[0, 3]], [[2, 1]]]], np.uint8),
            routed_experts=np.array([[[0, 3]], [[2, 1]], [[255, 255]], [[1, 0]], [[3, 2]]], np.uint8),
        ),
        "reward": messages.Reward(
            np.array([0.5, 1.0], np.float32),
            {"exact_match": np.array([0.0, 1.0], np.float32)},
            np.array([0.0, 0.1, 0.0, 0.0, -0.5], np.float32),
            np.array([3, 2], np.int32),
        ),
        "advantage": messages.Advantage(np.array([-0.7, 0.7], np.float32), 0.75),
        "dropped": messages.Dropped("no_signal", "all the same"),
        "quarantined": messages.Quarantined("reward", 3, "ValueError: no", "Traceback"),
        "requeued": messages.Requeued(1e9),
        "readmitted": messages.Readmitted("group.1.3"),
        "batch": messages.Batch([0, 1, 2, 3], 5, 1, 0.5, 0, 20, 1e9),
        "weights": messages.Weights(1, "f" * 32, [messages.Shard("weights/1.1.safetensors", 10, "0" * 32)], 1),
        "checkpoint": messages.Checkpoint(3, "checkpoints/3.1", "f" * 32, 1, messages.RowCounts(4, 4), 1),
        "value": [1.0, 2.0],
    }


@dataclass(frozen=True, slots=True)
class Message:
    """A message to publish; `kind` names the kind of subject."""

    kind: str
    subject: str
    data: bytes
    headers: dict[str, str] | None = None


class Fuzzer:
    """Draws messages for one run.

    Args:
        run: its name.
        seed: of all choices.
        step: where the run is now, so that messages hit what it is about to write.
        rows: rows of a step.
    """

    def __init__(self, run: str, seed: int, step: Callable[[], int] = lambda: 0, rows: int = 4) -> None:
        self.random = random.Random(seed)
        self._run, self._step, self._rows = run, step, rows
        self._valid = {name: encode(value, "rollout.0#1") for name, value in samples().items()}
        self._opened = {name: _open(value) for name, value in samples().items()}

    def message(self) -> Message:
        """Draw the next message."""
        make = self.random.choices(
            (self._row, self._eval, self._numbered, self._stranger, self._log, self._state), (10, 2, 3, 2, 2, 1)
        )[0]
        return make()

    def _row(self) -> Message:
        r = self.random
        if near := r.random() < 0.6:
            step, index = max(0, self._step() + r.randint(-1, 4)), r.randrange(3 * self._rows)
        else:
            step, index = r.choice((r.randrange(2000), r.choice(HUGE))), r.choice((r.randrange(200), r.choice(HUGE)))
        column = r.choice(COLUMNS)
        kind = f"group.{column}, {'near' if near else 'far'}"
        return Message(kind, f"relax.{self._run}.group.{step % 10**18}.{index % 10**18}.{column}", *self._cell(column))

    def _eval(self) -> Message:
        r = self.random
        version, index = r.choice((0, 2, r.randrange(100), r.choice(HUGE))), r.choice((r.randrange(8), r.choice(HUGE)))
        column = r.choice(COLUMNS)
        subject = f"relax.{self._run}.eval.{version % 10**18}.{index % 10**18}.{column}"
        return Message("eval", subject, *self._cell(column))

    def _numbered(self) -> Message:
        r = self.random
        kind = r.choice(NUMBERED)
        number = max(0, self._step() + r.randint(-1, 5)) if r.random() < 0.7 else r.choice(HUGE) % 10**18
        return Message(kind, f"relax.{self._run}.{kind}.{number}", *self._cell(kind))

    def _stranger(self) -> Message:
        """A subject of the stream that names no cell."""
        r = self.random
        odd = ("*", ">", "x", "-1", "01", "1e3", "9" * 40, "é", "$", "\u0661", "0x1", "<>", "(", "%s", "a" * 300)
        token = r.choice(odd)
        tail = r.choice(
            (
                f"group.{token}.{r.randrange(9)}.{r.choice(COLUMNS)}",
                f"group.{r.randrange(9)}.{token}.{r.choice(COLUMNS)}",
                f"group.{r.randrange(9)}.{r.randrange(9)}.{token}",
                f"eval.{token}.{token}.{r.choice(COLUMNS)}",
                f"{r.choice(NUMBERED)}.{token}",
            )
        )
        return Message("malformed subject", f"relax.{self._run}.{tail}", *self._cell(r.choice(COLUMNS)))

    def _log(self) -> Message:
        """An event or a metric; no crash, since the test counts crashes."""
        r = self.random
        role, n = r.choice((*ROLES, "x" * 200, "é")), r.choice(("0", "1", "x"))
        kind = r.choice(("ready", "evaluated", "row_dropped", "suppressed", "row_failed", "x"))
        body: dict[Any, Any] = {"time": 1e9, "kind": kind, "role": role, "n": int(n.replace("x", "2"))}
        body |= r.choice(({}, {}, {"kind": "step"}, {"role": "trainer"}))
        names = (
            "step",
            "reward",
            "version",
            "eval_version",
            "eval_reward",
            "time",
            "in_flight",
            "staleness",
            "row",
            "error",
        )
        body |= {name: self._json() for name in r.sample(names, r.randrange(5))}
        plain = r.choice((body, body, self._json()))
        data = r.choice((json.dumps(plain).encode(), json.dumps(plain).encode(), self._bytes(), b"[" * 5000))
        subject = r.choice((f"event.{role}.{n}.{kind}", f"event.{kind}", f"metric.{role}.{n}", "metric.x.y.z"))
        return Message("event or metric", f"relax.{self._run}.{subject}", data)

    def _state(self) -> Message:
        """An entry of the run's KV bucket."""
        r = self.random
        row = f"group.{self._step() + r.randrange(3)}.{r.randrange(self._rows)}"
        role = r.choice(ROLES)
        key = r.choice(
            (f"failure.{role}.{row}", f"incarnation.{role}.0", f"lease.{role}.{r.randrange(3)}", "lease.é.$", "x.y")
        )
        body = {name: self._json() for name in r.sample(("count", "pid", "since", "rows", "waits_for", "error"), 3)}
        data = r.choice((json.dumps(body).encode(), json.dumps(self._json()).encode(), self._bytes(), b"[" * 5000))
        return Message("KV state", f"$KV.RELAX_{self._run}_STATE.{key}", data)

    def _json(self) -> Any:
        r = self.random
        simple = (None, True, -1, 0, 3, 10**400, -(2**70), 1e308, float("nan"), float("-inf"), "NaN", "1e999", [], {})
        return r.choice((*simple, *TEXTS, [[[1]]], {"count": {}}, ["group.0.0"] * 50))

    def _cell(self, column: str) -> tuple[bytes, dict[str, str] | None]:
        r = self.random
        data = self.content(column)
        if r.random() < 0.03:
            names = ("Status", "Description", "Nats-Sequence", "Nats-Subject", "Nats-Pending-Messages")
            values = ("404", "409", "503", "100", "x", "Consumer Deleted", "-1", "é")
            headers = {r.choice(names): r.choice(values), "Status": r.choice(values)}
            return r.choice((b"", data)), headers
        return data, None

    def content(self, column: str) -> bytes:
        """Draw the bytes of a cell for a column."""
        r = self.random
        meant = column if column in self._valid else "value"
        name = meant if r.random() < 0.8 else r.choice(list(self._valid))
        whole = self._valid[name]
        makes: tuple[Callable[[], bytes], ...] = (
            self._bytes,
            lambda: msgpack.packb(self._nasty(3)),
            lambda: self._flipped(whole),
            lambda: whole[: r.randrange(len(whole))],
            lambda: whole + self._bytes(),
            lambda: self._mutated(name),
            lambda: self._mutated(name),
            lambda: self._mutated(name),
            lambda: whole,
        )
        return r.choice(makes)()

    def _bytes(self) -> bytes:
        r = self.random
        size = r.choice((0, 1, 16, 200, 3000)) if r.random() < 0.9995 else r.choice((1 << 20, 5 << 20))
        return r.randbytes(size)

    def _flipped(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            flipped[self.random.randrange(len(flipped))] ^= 1 << self.random.randrange(8)
        return bytes(flipped)

    def _mutated(self, name: str) -> bytes:
        """A valid envelope with one error."""
        r = self.random
        type_name, fields = self._opened[name][0], dict(self._opened[name][1])
        cell: Any = [1, type_name, "x.0#1", fields]
        field = r.choice(list(fields))
        match r.randrange(8):
            case 0:
                cell[0] = r.choice((0, 1, 3, -1, True, "1", None))
            case 1:
                cell[1] = r.choice(("Prompt", "Batch", "value", "", "x" * 3000, None, "os.system"))
            case 2:
                del fields[field]
            case 3:
                fields[r.choice(TEXTS)] = self._nasty(2)
            case 4:
                cell = r.choice((cell[:3], [*cell, 1], [*cell, r.randbytes(16)], fields, []))
            case _:
                fields[field] = self._nasty(4)
        return bytes(msgpack.packb(cell))

    def _nasty(self, depth: int) -> Any:
        """A value of any type, awkward values more often."""
        r = self.random
        made: tuple[Callable[[], Any], ...] = (
            lambda: r.choice(SCALARS),
            self._array,
            self._reference,
            lambda: [self._nasty(depth - 1) for _ in range(r.randrange(4))],
            lambda: {r.choice(TEXTS): self._nasty(depth - 1) for _ in range(r.randrange(4))},
            lambda: _nested(r.choice((60, 70, 400))),
            lambda: msgpack.ExtType(r.randrange(-1, 5) % 128, r.randbytes(r.randrange(20))),
            lambda: msgpack.Timestamp(1, 2),
        )
        return r.choice(made if depth > 0 else made[:3])()

    def _array(self) -> msgpack.ExtType:
        r = self.random
        dtype = r.choice(("int32", "float32", "float64", "bool", "uint8", "float16", "object", "complex64", 3, None))
        shape = r.choice(([], [0], [1], [2], [5], [2, 2], [-1], [2**63], [0, 2**62], [1] * 9, "x", [1.5]))
        size = r.choice((0, 1, 4, 8, 20, 40))
        body = r.choice((r.randbytes(size), b"\0\0\xc0\x7f" * (size // 4), b"\xff" * size))
        return msgpack.ExtType(1, msgpack.packb(r.choice(([dtype, shape, body], [dtype, shape], dtype, [body]))))

    def _reference(self) -> msgpack.ExtType:
        r = self.random
        uri = r.choice(
            ("group/0/0.trajectory.rollout.0-1.safetensors", "../config.json", "/etc/passwd", "", "\0", "x" * 5000, ".")
        )
        number = r.choice((0, 4, 20, 4096, *HUGE))
        dtype, shape, fits = r.choice(
            (("float32", [1], 4), ("int32", [5], 20), ("uint8", [0, 2**63 - 1], 0), ("float64", [2**40], 2**43))
        )
        return msgpack.ExtType(2, msgpack.packb([uri, number, r.choice((number, fits, fits)), dtype, shape, "0" * 32]))


def _open(value: Any) -> tuple[str, dict[str, Any]]:
    """Type and fields of a message, as they are stored in a cell."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, _plain(value)
    return "value", {"value": value}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(1, msgpack.packb([value.dtype.name, list(value.shape), value.tobytes()]))
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value
