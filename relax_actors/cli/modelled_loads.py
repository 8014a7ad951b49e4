"""`relax simulate --autoscaler`: the autoscaler of a configuration on modelled loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from relax_actors.autoscaling.loads import HOURS, LOADS, ROW_SECONDS, START_SECONDS, best_fixed, run_scaled
from relax_actors.config import load_config
from relax_actors.config.autoscaler import AutoscalerSection
from relax_actors.config.rows import admitted_rows
from relax_actors.errors import ConfigError
from relax_actors.monitoring.screen import Screen

NO_SECTION = "relax simulate --autoscaler needs a section [autoscaler]; docs/how-to/autoscaling.md has an example"


def rows_of(section: AutoscalerSection, rows_per_engine: int, admitted: int) -> list[dict[str, Any]]:
    """Run all loads, and return one line of the table for each."""
    lines = []
    for load in LOADS:
        scaled = run_scaled(load, rows_per_engine, admitted, section)
        size, fixed = best_fixed(load, rows_per_engine, admitted, section.max)
        lines.append(
            {
                "load": load.name,
                "starved": round(scaled.starved, 4),
                "engine_hours": round(scaled.engine_hours, 1),
                "largest": scaled.largest,
                "changes": len(scaled.changes),
                "most_changes_an_hour": scaled.changes_an_hour,
                "fixed_size": size,
                "fixed_starved": round(fixed.starved, 4),
                "fixed_engine_hours": round(fixed.engine_hours, 1),
            }
        )
    return lines


def show_loads(path: Path, settings: list[str], *, as_json: bool) -> int:
    """Print how the autoscaler of a configuration does on each load, and return the exit code.

    Raises:
        ConfigError: the configuration cannot work, or has no section [autoscaler].
    """
    config = load_config(path, settings)
    if config.autoscaler is None:
        raise ConfigError(NO_SECTION)
    each, admitted = config.rollout.max_concurrent_prompts, admitted_rows(config)
    lines = rows_of(config.autoscaler, each, admitted)
    if as_json:
        sys.stdout.write(json.dumps({"run": config.run.name, "hours": HOURS, "loads": lines}) + "\n")
        return 0
    table = Table(
        title=f"{config.run.name}: autoscaler on modelled loads of {HOURS:g} hours",
        caption=(
            f"{each} rows an engine, {ROW_SECONDS:g} s a row, {admitted} rows admitted, "
            f"{START_SECONDS:g} s for a new engine"
        ),
    )
    columns = ("load", "starved", "engine h", "largest", "changes", "most/h", "best fixed", "starved", "engine h")
    for column in columns:
        table.add_column(column, justify="left" if column == "load" else "right")
    for line in lines:
        shown = {name: f"{value:.1%}" if name.endswith("starved") else str(value) for name, value in line.items()}
        table.add_row(*shown.values())
    Screen(width=None if sys.stdout.isatty() else 120).print(table)
    return 0
