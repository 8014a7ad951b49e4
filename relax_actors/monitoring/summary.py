"""Ledger and result of a run, read from its table."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from broker.table import Table
from relax_actors.errors import CodecError
from relax_actors.messages import Batch, Checkpoint, Evaluation, Weights
from relax_actors.runtime.cells import is_oversized
from relax_actors.training.ledger import Account, Ledger, ledger_of

if TYPE_CHECKING:
    from relax_actors.config import Config
    from relax_actors.config.saved import SavedSettings

READ = {"batch": Batch, "checkpoint": Checkpoint, "weights": Weights}
"""Numbered cells that the ledger counts; those that cannot be decoded are ignored."""
ENDS_OF_CURVE = 10
"""Steps at the start and the end of a run whose mean rewards are reported."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a run.

    Attributes:
        run: name of the run.
        steps: optimizer steps done.
        reward_first: mean reward of the first ten steps; None if rows come from data.
        reward_last: mean reward of the last ten steps.
        loss_first: mean loss of the first ten steps, if rows come from data.
        loss_last: mean loss of the last ten steps.
        seconds: duration of this `relax up`, imports and checks included.
        restarts: number of restarts of all processes during this `relax up`, as its view counted them.
        admitted: rows admitted; trained + dropped + quarantined + in_flight.
        trained: rows trained.
        dropped: rows dropped.
        quarantined: rows quarantined.
        weights_fingerprint: digest of the last weights.
        in_flight: rows without an end.
        eval_first: mean reward over held-out prompts of the first evaluated version.
        eval_last: mean reward over held-out prompts of the last evaluated version.
        seconds_to_ready: time from the start of this `relax up` until all of its actors were ready.
        seconds_to_first_step: time from the start of this `relax up` to its first optimizer step.
    """

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
    seconds_to_ready: float | None = None
    seconds_to_first_step: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None

    def json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Curves:
    """What a run improves, by step, and the mean rewards of its evaluations, by version.

    Attributes:
        figure: "reward" if the policy samples the rows, else "loss".
        steps: pairs of a step and its figure.
        evals: pairs of a version and its mean reward.
    """

    figure: Literal["reward", "loss"]
    steps: list[tuple[int, float]]
    evals: list[tuple[int, float]]


def read_ledger(table: Table, config: Config | SavedSettings) -> Ledger:
    """Compute the ledger of a run from its cells as they are now; malformed cells are ignored."""
    ledger = ledger_of(config)
    subjects = table.subjects
    columns = [subjects.column(name) for name in ("prompt", "dropped", "quarantined")]
    numbered = [subjects.numbered(kind, "*") for kind in READ]
    # Caught up: rows are purged after the checkpoint that covers them, so reading must not miss that checkpoint.
    for cell_id, cell in table.snapshot([*columns, *numbered], caught_up=True):
        if is_oversized(cell_id, cell):
            continue
        try:
            expected = READ.get(cell_id.kind)
            value = table.read(cell.data, expected, subject=cell.subject) if expected else None
        except CodecError:
            continue
        ledger.observe(cell_id, value if isinstance(value, Batch | Checkpoint) else None)
    return ledger


def accounting(ledger: Ledger) -> dict[str, Any]:
    """Return floor, number of rows by their end, and violations of a ledger as plain data."""
    account = ledger.account()
    return {
        "floor": ledger.floor,
        "admitted": account.admitted,
        "trained": account.trained,
        "dropped": account.dropped,
        "quarantined": account.quarantined,
        "in_flight": account.in_flight,
        "violations": ledger.violations(),
    }


def read_curves(table: Table, ledger: Ledger, *, from_data: bool) -> Curves:
    """Read a run's curves: rewards, or losses if rows come from data."""
    evaluations: list[Evaluation] = []
    for _, cell in table.snapshot([table.subjects.numbered("evaluation", "*")]):
        with suppress(CodecError):
            evaluations.append(table.read(cell.data, Evaluation, subject=cell.subject))
    by_step = {step: batch.reward for step, batch in ledger.batches.items()}
    if from_data:
        from relax_actors.monitoring.recorded import read_metrics  # noqa: PLC0415 imports pydantic

        by_step = {int(body["step"]): float(body["loss"]) for body in read_metrics(table, "trainer", "step")}
    figure: Literal["reward", "loss"] = "loss" if from_data else "reward"
    return Curves(figure, sorted(by_step.items()), sorted((e.version, e.reward) for e in evaluations if e.rows))


def summarise(table: Table, config: Config, *, seconds: float, restarts: int) -> tuple[Summary, Curves]:
    """Read the result of a run and its curves."""
    ledger = read_ledger(table, config)
    curves = read_curves(table, ledger, from_data=config.from_data)
    account: Account = ledger.account()
    values = [value for _, value in curves.steps]
    first, last = _mean(values[:ENDS_OF_CURVE]), _mean(values[-ENDS_OF_CURVE:])
    weights = table.fetch_last("weights", Weights)
    summary = Summary(
        run=config.run.name,
        steps=ledger.version or 0,
        reward_first=None if config.from_data else first,
        reward_last=None if config.from_data else last,
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
        loss_first=first if config.from_data else None,
        loss_last=last if config.from_data else None,
    )
    return summary, curves


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
