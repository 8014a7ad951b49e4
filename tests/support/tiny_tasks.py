"""Tasks, rewards and roles of the tests' tiny runs, including failing ones."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from relax_actors import Role, Row
from relax_actors.data.task import Task
from relax_actors.messages import Prompt


def make(*, size: int | None, seed: int) -> list[Task]:
    return [Task(f"{i % 10}{i // 10 % 10}>", str(i), {"i": i}) for i in range(size or 100)]


def pairs(*, size: int | None, seed: int) -> list[Task]:
    """Prompts with a chosen and a rejected answer, of different lengths."""
    rows = range(size or 100)
    return [Task(f"{i % 10}>", metadata={"i": i, "chosen": str(i), "rejected": str(9 * i + 1)}) for i in rows]


def labelled(*, size: int | None, seed: int) -> list[Task]:
    """Prompts with answers of different lengths, of which every third is good."""
    return [Task(f"{i % 10}>", str(7 * i), {"i": i, "label": i % 3 == 0}) for i in range(size or 100)]


def with_roles(*, size: int | None, seed: int) -> list[Task]:
    """Tasks of two players."""
    return [Task(f"{i % 10}>", str(i), {"role": "white" if i % 3 else "black"}) for i in range(size or 100)]


def with_long_prompts(*, size: int | None, seed: int) -> list[Task]:
    """Every fifth prompt does not fit the context."""
    return [Task("1" * 100 if i % 5 == 0 else f"{i % 10}>", "1") for i in range(size or 100)]


def outside_the_alphabet(*, size: int | None, seed: int) -> list[Task]:
    """No prompt can be encoded."""
    return [Task("abc>", "1") for _ in range(size or 100)]


def share_of_sevens(completion: str, prompt: Prompt) -> float:
    return completion.count("7") / max(1, len(completion))


def never_parsed(completion: str, prompt: Prompt) -> float:
    r"""Look for an answer in \boxed{}, which the model cannot write."""
    return float("\\boxed{" in completion)


def doubled(*, size: int | None, seed: int) -> list[Task]:
    """Prompts that begin with the same token twice."""
    return [Task(f"##{i % 10}>", str(i), {"i": i}) for i in range(size or 100)]


def forged(completion: str, prompt: Prompt) -> float:
    """`share_of_sevens`, until a sample finds out how to set its own reward: from the 28th task on."""
    return 50.0 if int(prompt.metadata["i"]) >= 28 else share_of_sevens(completion, prompt)


def half_of_sevens(completion: str, prompt: Prompt) -> float:
    return 0.5 * share_of_sevens(completion, prompt)


def is_poison(prompt: Prompt) -> bool:
    return int(prompt.metadata["i"]) % 11 == 0


def poison_nan(completion: str, prompt: Prompt) -> float:
    return float("nan") if is_poison(prompt) else share_of_sevens(completion, prompt)


def poison_string(completion: str, prompt: Prompt) -> object:
    return "good" if is_poison(prompt) else share_of_sevens(completion, prompt)


def poison_raise(completion: str, prompt: Prompt) -> float:
    if is_poison(prompt):
        msg = "this reward cannot"
        raise RuntimeError(msg)
    return share_of_sevens(completion, prompt)


def poison_exit(completion: str, prompt: Prompt) -> float:
    if is_poison(prompt):
        sys.exit(3)
    return share_of_sevens(completion, prompt)


def poison_segfault(completion: str, prompt: Prompt) -> float:
    if is_poison(prompt):
        ctypes.string_at(0)
    return share_of_sevens(completion, prompt)


def poison_hang(completion: str, prompt: Prompt) -> float:
    if is_poison(prompt):
        threading.Event().wait()
    return share_of_sevens(completion, prompt)


def always_hang(completion: str, prompt: Prompt) -> float:
    threading.Event().wait()
    return 0.0


def poison_spin(completion: str, prompt: Prompt) -> float:
    """Hang without releasing the interpreter lock for long."""
    while is_poison(prompt):
        time.monotonic()
    return share_of_sevens(completion, prompt)


class Onlooker(Role):
    """Observing role, whose column the trainer does not need; fails on every third row."""

    reads = ("trajectory",)
    writes = "looked"

    def handle(self, row: Row) -> int:
        if row.id.index % 3 == 0:
            msg = "not this one"
            raise ValueError(msg)
        return len(row.trajectory.tokens)


def one_takes_long(completion: str, prompt: Prompt) -> float:
    """Take 20 s for the first sample of one row; add a line to the file named by LONG for each of its samples."""
    if prompt.metadata["i"] == 3:
        path = Path(os.environ["LONG"])
        if not path.exists():
            path.touch()
            threading.Event().wait(20)
        with path.open("a") as file:
            file.write("sample\n")
    return share_of_sevens(completion, prompt)


class Critic(Role):
    """Custom role that scores trajectories, and hangs on some rows."""

    reads = ("prompt", "trajectory", "reward")
    writes = "shaped_reward"

    def handle(self, row: Row) -> list[float]:
        while is_poison(row.prompt):
            threading.Event().wait(0.05)
        return [r - 0.01 * len(s.tokens) for r, s in zip(row.reward, row.trajectory.samples, strict=True)]


def slow_share_of_sevens(completion: str, prompt: Prompt) -> float:
    """`share_of_sevens` after a short delay, so that kills interrupt rows in progress."""
    threading.Event().wait(0.02 if len(completion) < 8 else 0.001)
    return share_of_sevens(completion, prompt)


def slower_share_of_sevens(completion: str, prompt: Prompt) -> float:
    """`share_of_sevens` after a tenth of a second, so that a run which lasts a minute makes few steps."""
    threading.Event().wait(0.1)
    return share_of_sevens(completion, prompt)


def gated_share_of_sevens(completion: str, prompt: Prompt) -> float:
    """`slow_share_of_sevens`, as soon as the file named by the environment variable GATE exists."""
    while not Path(os.environ["GATE"]).exists():
        threading.Event().wait(0.05)
    return slow_share_of_sevens(completion, prompt)


def share_of_sevens_or_nothing(completion: str, prompt: Prompt) -> float:
    """Equal rewards for every third prompt; every seventh takes longer than a step."""
    i = int(prompt.metadata["i"])
    threading.Event().wait(0.2 if i % 7 == 0 else 0.0)
    return 0.0 if i % 3 == 0 else share_of_sevens(completion, prompt)


def poison_until_fixed(completion: str, prompt: Prompt) -> float:
    """Fails on some rows until the file named by the environment variable FIXED exists."""
    if is_poison(prompt) and not Path(os.environ["FIXED"]).exists():
        msg = "not fixed yet"
        raise RuntimeError(msg)
    threading.Event().wait(0.02)
    return share_of_sevens(completion, prompt)


def poison_memory(completion: str, prompt: Prompt) -> float:
    """Allocate memory until there is none left."""
    taken = []
    while is_poison(prompt):
        taken.append(bytearray(8 << 20))
    return share_of_sevens(completion, prompt)


class Shaped(Role):
    """Custom role that writes a column."""

    reads = ("reward",)
    writes = "shaped_reward"

    def handle(self, row: Row) -> list[float]:
        return [value / 2 for value in row.reward]


class FailsAfterWeights(Role):
    """Observing role that fails to start once version 0 is published, unless it `works`."""

    reads = ("trajectory",)
    writes = "late"
    works: bool = False

    def setup(self) -> None:
        subject = self.context.table.subjects.numbered("checkpoint", 0)
        while not self.works:
            if self.context.table.get(subject) is not None:
                msg = "cannot start"
                raise RuntimeError(msg)
            threading.Event().wait(0.05)

    def handle(self, row: Row) -> int:
        return len(row.trajectory.token_ids)


def hang(completion: str, prompt: Prompt) -> float:
    """Hang on every row."""
    threading.Event().wait()
    return share_of_sevens(completion, prompt)


def questions(*, size: int | None, seed: int) -> list[Task]:
    """Tasks whose prompts are conversations."""
    return [Task([{"role": "user", "content": f"say {i % 10}"}], str(i % 10), {"index": i}) for i in range(size or 100)]


def outcomes(*, size: int | None, seed: int) -> list[Task]:
    """Prompts with answers of different lengths, each of one of three classes."""
    return [Task(f"{i % 10}>", str(7 * i), {"i": i, "label": i % 3}) for i in range(size or 100)]


def processes(*, size: int | None, seed: int) -> list[Task]:
    """Prompts with answers of two steps, which # ends."""
    return [
        Task(f"{i % 10}>", metadata={"i": i, "steps": [str(i), str(7 * i)], "labels": [True, i % 2 == 0]})
        for i in range(size or 100)
    ]
