"""The result of a run, read from its table."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import CodecError
from relax_actors.messages import Batch, Checkpoint, Evaluation, Weights
from relax_actors.runtime.cells import KINDS
from relax_actors.training.ledger import Account, Ledger

ENDS_OF_CURVE = 10


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. Rewards are means over the first and the last ten steps, `eval_*` over held-out prompts."""

    run: str
    steps: int
    reward_first: float | None
    reward_last: float | None
    seconds: float
    restarts: int
    admitted: int
    trained: int
    dropped: int
    quarantined: int
    weights_fingerprint: str | None
    in_flight: int = 0
    eval_first: float | None = None
    eval_last: float | None = None
    seconds_to_first_step: float | None = None

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Curves:
    """Mean reward of each step, and of each evaluated version."""

    rewards: list[tuple[int, float]]
    evals: list[tuple[int, float]]


def read_ledger(table: Table, config: Config) -> Ledger:
    """The ledger of a run, from its cells as they are now; malformed ones are left out."""
    ledger = Ledger(config.trainer.prompts_per_step, config.run.steps, config.staleness.max)
    subjects = table.subjects
    columns = [subjects.column(name) for name in ("prompt", "dropped", "quarantined")]
    numbered = [subjects.numbered(kind, "*") for kind in ("batch", "weights", "checkpoint")]
    # Caught up: a checkpoint is written before the rows that it covers are purged, and must not be missing beside them.
    for cell_id, cell in table.snapshot([*columns, *numbered], caught_up=True):
        try:
            expected = KINDS.get(cell_id.kind)
            value = table.read(cell.data, expected, subject=cell.subject) if expected else None
        except CodecError:
            continue
        ledger.observe(cell_id, value if isinstance(value, Batch | Checkpoint) else None)
    return ledger


def read_curves(table: Table, ledger: Ledger) -> Curves:
    """The reward curves of a run."""
    found: list[Evaluation] = []
    for _, cell in table.snapshot([table.subjects.numbered("evaluation", "*")]):
        with suppress(CodecError):
            found.append(table.read(cell.data, Evaluation, subject=cell.subject))
    rewards = [(step, batch.reward) for step, batch in sorted(ledger.batches.items())]
    return Curves(rewards, sorted((e.version, e.reward) for e in found if e.rows))


def summarise(table: Table, config: Config, *, seconds: float, restarts: int) -> tuple[Summary, Curves]:
    """The result of a run as its table tells it."""
    ledger = read_ledger(table, config)
    curves = read_curves(table, ledger)
    account: Account = ledger.account()
    rewards = [value for _, value in curves.rewards]
    weights = table.fetch_last("weights", Weights)
    summary = Summary(
        run=config.run.name,
        steps=ledger.version or 0,
        reward_first=_mean(rewards[:ENDS_OF_CURVE]),
        reward_last=_mean(rewards[-ENDS_OF_CURVE:]),
        seconds=round(seconds, 2),
        restarts=restarts,
        admitted=account.admitted,
        trained=account.trained,
        dropped=account.dropped,
        quarantined=account.quarantined,
        in_flight=account.in_flight,
        weights_fingerprint=weights.fingerprint if weights else None,
        eval_first=curves.evals[0][1] if curves.evals else None,
        eval_last=curves.evals[-1][1] if curves.evals else None,
    )
    return summary, curves


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def draw(curves: Curves, path: Path, title: str) -> None:
    """Draw the reward curves to a PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    steps, rewards = [s for s, _ in curves.rewards], [r for _, r in curves.rewards]
    axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=0.8)
    window = max(1, len(rewards) // 50)
    smooth = [
        sum(rewards[max(0, i - window) : i + 1]) / len(rewards[max(0, i - window) : i + 1]) for i in range(len(rewards))
    ]
    axes.plot(steps, smooth, color="tab:blue", label="reward of the step")
    if curves.evals:
        axes.plot(*zip(*curves.evals, strict=True), color="tab:orange", marker="o", label="held-out reward, greedy")
    axes.set(xlabel="optimizer step", ylabel="reward", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
