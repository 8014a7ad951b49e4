"""Registry of the sinks of `relax monitor`.

To add a sink, write a class that follows `Sink` and add its line to `SINKS`. Another distribution adds one by an entry
point of the group `relax_actors.monitors`:

    [project.entry-points."relax_actors.monitors"]
    csv = "my_package.csv_sink:CsvSink"
"""

from __future__ import annotations

from contextlib import ExitStack

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks.base import LogMessage, Sink
from relax_actors.registry.dotted import load
from relax_actors.registry.plugins import entry_points_of, load_entry_point

GROUP = "relax_actors.monitors"
SINKS = {
    "prometheus": "relax_actors.monitoring.sinks.prometheus:Prometheus",
    "tensorboard": "relax_actors.monitoring.sinks.tensorboard:TensorBoard",
    "wandb": "relax_actors.monitoring.sinks.wandb:WeightsAndBiases",
}


def open_sink(setting: str, run: str) -> Sink:
    """Open the sink of one option `--sink NAME=TARGET`.

    Args:
        setting: NAME=TARGET.
        run: name of the run.

    Raises:
        ConfigError: an unknown sink, an unusable target, or a package that is not installed.
    """
    name, equals, target = setting.partition("=")
    others = {} if name in SINKS else entry_points_of(GROUP)
    if not equals or not target or name not in (*SINKS, *others):
        known = ", ".join(sorted({*SINKS, *entry_points_of(GROUP)}))
        msg = f"--sink {setting!r} is no NAME=TARGET with a known sink; sinks are {known}"
        raise ConfigError(msg)
    factory = load_entry_point(others[name]) if name in others else load(SINKS[name], f"--sink {name}")
    if not callable(factory):
        msg = f"--sink {name}: {factory!r} is no class; name the class of the sink in its entry point"
        raise ConfigError(msg)
    sink: Sink = factory(target, run)
    return sink


def open_sinks(settings: list[str], run: str) -> list[Sink]:
    """Open the sinks of all options `--sink`; if one fails, close the others.

    Raises:
        ConfigError: as by `open_sink`.
    """
    with ExitStack() as opened:
        sinks = []
        for setting in settings:
            sinks.append(open_sink(setting, run))
            opened.callback(sinks[-1].close)
        opened.pop_all()
    return sinks


__all__ = ["GROUP", "SINKS", "LogMessage", "Sink", "open_sink", "open_sinks"]
