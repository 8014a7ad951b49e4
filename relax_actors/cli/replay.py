"""`relax replay`: compute a step of a run again, and compare it with what was recorded."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import AsJson, Broker, Credentials, Overrides, RunName

if TYPE_CHECKING:
    from relax_actors.replay.recording import Recording
    from relax_actors.replay.steps import Replay


def replay(
    run: RunName,
    settings: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Step to compute again.", min=0)] = None,
    rollout: Annotated[
        str | None, typer.Option(help="Row to sample again, such as 412.3, in place of a step.", metavar="ROW")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Measure gradients by micro-batch and tensor, for --json.")
    ] = False,
    json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Compute a step of a run again, and compare figures and weights with the record.

    The computation begins at the newest kept checkpoint before the step. With settings, it shows what they would have
    changed. Nothing of the run is written. Exit code 0 if all is equal, 1 if something differs, 2 if the step was not
    kept.
    """
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.access import Access
    from relax_actors.replay.recording import opened

    if (step is None) == (rollout is None):
        msg = "say what to compute again: --step N, or --rollout ROW"
        raise ConfigError(msg)
    if gradients and (step is None or not json):
        msg = "--gradients measures the gradients of a step for --json: give --step N and --json with it"
        raise ConfigError(msg)
    with opened(run, Access(broker, credentials)) as recording:
        if step is None:
            raise typer.Exit(_resampled(recording, rollout or "", settings or [], as_json=json))
        body, results = _replayed(recording, step, settings or [], quiet=json, gradients=gradients)
    if json:
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _show(body, results)
    raise typer.Exit(0 if body["equal"] else 1)


def _resampled(recording: Recording, name: str, settings: list[str], *, as_json: bool) -> int:
    """Sample a row again and show the comparison; return the exit code."""
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable
    from relax_actors.replay.rows import row_of, sample_again

    body = sample_again(recording, row_of(name), settings)
    if as_json:
        sys.stdout.write(json_module.dumps(body) + "\n")
        return 0 if body["equal"] else 1
    screen = Screen()
    verdict = "equal" if body["equal"] else "not equal"
    screen.show(printable(f"{body['row']}: {body['samples']} samples by version {body['version']}: {verdict}"), "bold")
    if body["inexact"] and not body["equal"]:
        screen.show(printable(f"  {body['inexact']}"))
    for key, value in (body["difference"] or {}).items():
        screen.show(printable(f"  first difference, {key}: {value}"))
    return 0 if body["equal"] else 1


def _replayed(
    recording: Recording, step: int, settings: list[str], *, quiet: bool, gradients: bool
) -> tuple[dict[str, Any], list[Replay]]:
    import torch

    from relax_actors.replay.exactness import check_devices, devices_of, why_inexact
    from relax_actors.replay.steps import Replayer
    from relax_actors.runtime.code_version import source_version

    def progress(text: str) -> None:
        if not quiet and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")

    recording.batch(step)
    config = recording.config_with(settings)
    check_devices(config, torch.cuda.device_count())
    names = ["policy", *(["critic"] if config.critic is not None else [])]
    devices = zip(devices_of(config), ("checkpoint", "critic_checkpoint"), strict=False)
    recorded = {name: recording.devices_around(step, kind) for (name, _), kind in devices}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if (inexact := why_inexact(config, gpu, recorded)) and not quiet:
        sys.stderr.write(f"{inexact}\n")
    results = []
    for name in names:
        replayer = Replayer(recording, config, name, progress, gradients=gradients)
        try:
            results.append(replayer.replay(step))
        finally:
            replayer.model.close()
    progress("")
    policy, *critic = results
    code = {"recorded": recording.code, "present": source_version()}
    body = {"run": recording.run, "step": step, **policy.json(), "critic": critic[0].json() if critic else None}
    body |= {"equal": all(result.equal for result in results), "settings": settings, "inexact": inexact}
    return body | {"code": code | {"equal": code["recorded"] == code["present"]}}, results


def _show(body: dict[str, Any], results: list[Replay]) -> None:
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    screen = Screen()
    for result in results:
        steps = f"steps {result.steps[0]} to {result.steps[-1]}" if result.steps else "no step"
        verdict = "equal" if result.equal else "not equal"
        screen.show(printable(f"{result.model}: {steps} from checkpoint {result.checkpoint}: {verdict}"), "bold")
        screen.show(printable(f"  recorded {result.recorded}"))
        screen.show(printable(f"  computed {result.computed}"))
        same = sum(figure.equal for figure in result.figures.values())
        if result.figures:
            screen.show(f"  figures: {same} of {len(result.figures)} equal")
        else:
            screen.show("  figures: the log does not have those of this step any more")
        for name, figure in result.figures.items():
            if not figure.equal:
                screen.show(printable(f"    {name}: recorded {figure.recorded}, computed {figure.computed}"))
        if result.difference is not None:
            for name, value in result.difference.json().items():
                screen.show(printable(f"  first difference, {name.replace('_', ' ')}: {value}"))
    if not body["code"]["equal"] and not body["equal"]:
        screen.show("the code of relax-actors is not the code that started the run last")
