"""Registry of the sinks of `relax monitor`.

To add a sink, write a class that follows `Sink` and add its line to `SINKS`. Another distribution adds one by an entry
point of the group `relax_actors.monitors`:

    [project.entry-points."relax_actors.monitors"]
    csv = "my_package.csv_sink:CsvSink"
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.sinks.base import Sink
from relax_actors.registry import Registry

SINKS: Registry[Callable[[str, str], Sink]] = Registry(
    "sink",
    "relax_actors.monitors",
    {
        "prometheus": "relax_actors.monitoring.sinks.prometheus:Prometheus",
        "tensorboard": "relax_actors.monitoring.sinks.tensorboard:TensorBoard",
        "wandb": "relax_actors.monitoring.sinks.wandb:WeightsAndBiases",
    },
)


def open_sink(setting: str, run: str) -> Sink:
    """Open the sink of `--sink NAME=TARGET`; NAME is registered or a dotted path.

    Raises:
        ConfigError: an unknown sink, an unusable target, or a package that is not installed.
    """
    name, _, target = setting.partition("=")
    if not name or not target:
        msg = f"--sink {setting!r} is no NAME=TARGET; names are {', '.join(SINKS.names())}"
        raise ConfigError(msg)
    factory = SINKS.load(name, "--sink")
    if not callable(factory):
        msg = f"--sink {name}: {factory!r:.200} is not the class of a sink; fix the dotted path or the entry point"
        raise ConfigError(msg)
    try:
        return factory(target, run)
    except OSError as error:
        msg = f"--sink {setting}: {error}; give another target, or fix its permissions"
        raise ConfigError(msg) from error


def open_sinks(settings: list[str], run: str) -> list[Sink]:
    """Open the sinks of all `--sink`, or none; raises as `open_sink`."""
    with ExitStack() as opened:
        sinks = []
        for setting in settings:
            sinks.append(open_sink(setting, run))
            opened.callback(sinks[-1].close)
        opened.pop_all()
    return sinks


__all__ = ["SINKS", "LogMessage", "Sink", "open_sink", "open_sinks"]
