"""Metrics from the log of a run, measured or recorded for `relax simulate`."""

from __future__ import annotations

from typing import Any

import numpy as np

from broker.ordered_consumer import OrderedConsumer
from broker.table import CALL_DEADLINE, Table
from relax_actors.config import Config
from relax_actors.config.simulate import Distribution
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.simulation.durations import with_values

QUANTILES = 101
MAX_SECONDS = 1e9
WARMUP_SHARE = 0.1
"""Share of the recorded values that is left out at the start of a run."""


def read_metrics(table: Table, role: str, kind: str = "") -> list[dict[str, Any]]:
    """Return metrics of one kind of a role's actors, in order, without false claims.

    Metrics about an actor itself have the kind "".
    """
    follower = OrderedConsumer(table.connection, table.subjects.log_stream, [table.subjects.metric(role, "*")])
    messages = table.connection.call(follower.read_all(), CALL_DEADLINE)
    metrics = [LogMessage.parse(message.subject, message.data) for message in messages]
    return [metric.body for metric in metrics if metric is not None and metric.kind == kind and not metric.claim]


def with_recorded(config: Config) -> Config:
    """Return the configuration with the quantiles of recorded runs in place of `recorded`.

    Raises:
        ConfigError: no such run, no such metrics in its log, or a phase that runs do not record.
    """
    simulate = config.simulate
    if simulate is None:
        return config
    for name, value in [*simulate.phases, ("tokens", simulate.generation.tokens)]:
        if value.recorded is not None:
            msg = f"simulate: {name} cannot be taken from a recorded run; generation.row and training.step can"
            raise ConfigError(msg)
    generation, training = simulate.generation, simulate.training
    if generation.row is not None and generation.row.recorded is not None:
        row = _quantiles(generation.row.recorded, "rollout", "generated", "seconds")
        generation = with_values(generation, row=row)
    if training.step is not None and training.step.recorded is not None:
        step = _quantiles(training.step.recorded, "trainer", "step", "train_seconds")
        training = with_values(training, step=step)
    return with_values(config, simulate=with_values(simulate, generation=generation, training=training))


def _quantiles(run: str, role: str, kind: str, name: str) -> Distribution:
    with connected(run) as at:
        values = (body.get(name) for body in read_metrics(at.table, role, kind))
        seconds = [float(value) for value in values if isinstance(value, int | float) and 0 < value < MAX_SECONDS]
    seconds = seconds[int(WARMUP_SHARE * len(seconds)) :]
    if not seconds:
        msg = f"run {run} has no metric {name} of kind {kind!r} of role {role}; record it again with this version"
        raise ConfigError(msg)
    return Distribution(values=np.quantile(seconds, np.linspace(0, 1, QUANTILES)).round(5).tolist())
