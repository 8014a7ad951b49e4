"""Runs on recorded samples, undisturbed and killed, end with the weights of the run that sampled them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from relax_actors.messages import Weights
from tests.support.kills import kill_actors
from tests.support.running import ON_POLICY, SUPPORT, Run, kill, processes_of, relax, wait_until

TRACES, EXAMPLES = SUPPORT / "tiny_traces.toml", SUPPORT / "tiny_best_traces.toml"
STEPS = 6
KEEPS_ROWS = ("run.steps=1000", "trainer.checkpoint_every=1000")
"""Settings of a run that collects no row before it is killed."""
EPISODES = (
    "environment.name=tiny_pick.Pick",
    "data.function=tiny_pick.make",
    "rollout.max_tokens=2",
    "reward.function=environment",
)
FAST = ("supervision.intensity=100000", "supervision.backoff_max=0.2", "supervision.ack_wait=1")


def sampled_run(run: Run) -> str:
    """Start a run, kill all of its processes behind `STEPS` steps, and return the fingerprint of its weights then."""
    run.start()
    last = f"relax.{run.name}.weights.{STEPS}"
    wait_until(lambda: run.table.get(last), last, 120)
    weights = run.table.fetch(last, Weights)
    run.disconnect()
    while pids := processes_of(run.folder.root):
        for pid in pids:
            kill(pid)
    assert weights is not None
    return weights.fingerprint


def exported(run: Run, name: str, *options: str) -> str:
    """Export the rows of the first `STEPS` steps; return the path of the file."""
    steps = [option for step in range(STEPS) for option in ("--step", str(step))]
    done = relax("traces", "export", str(run.folder.root), name, *options, *steps, cwd=run.cwd)
    assert done.returncode == 0, done.stderr
    checked = relax("traces", "check", name, "--model", str(run.folder.root / "model-config"), cwd=run.cwd)
    assert checked.returncode == 0, checked.stdout
    return str(run.cwd / name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "settings"), [("atif", ()), ("verifiers", EPISODES)], ids=["completions", "episodes"])
def test_run_on_traces_ends_with_the_weights_of_the_run_that_sampled_them(
    kind: str, settings: tuple[str, ...], make_run: Callable[..., Run]
) -> None:
    own = make_run("own", *ON_POLICY, *KEEPS_ROWS, *settings)
    weights = sampled_run(own)
    path = exported(own, "own.jsonl", "--format", kind)
    again = make_run("again", f"data.path={path}", f"run.steps={STEPS}", "staleness.max=0", config=TRACES).complete()
    assert (again["steps"], again["dropped"], again["quarantined"]) == (STEPS, 0, 0)
    assert again["weights_fingerprint"] == weights


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_on_traces_ends_with_the_same_weights(make_run: Callable[..., Run]) -> None:
    own = make_run("own", *ON_POLICY, *KEEPS_ROWS)
    weights = sampled_run(own)
    killed_on_traces(make_run, weights, f"data.path={exported(own, 'own.parquet')}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_on_the_best_samples_as_examples_ends_with_the_same_weights(make_run: Callable[..., Run]) -> None:
    own = make_run("own", *ON_POLICY, *KEEPS_ROWS)
    sampled_run(own)
    settings = (f"data.path={exported(own, 'own.parquet')}",)
    calm = make_run("calm", *settings, f"run.steps={STEPS}", config=EXAMPLES).complete()
    killed_on_traces(make_run, calm["weights_fingerprint"], *settings, config=EXAMPLES)


def killed_on_traces(make_run: Callable[..., Run], weights: str, *settings: str, config: Path = TRACES) -> None:
    """Kill an actor of a run at each of its steps, and compare its last weights."""
    run = make_run("killed", *settings, f"run.steps={STEPS}", *FAST, config=config).start()
    victims = cycle(("examples.0", "trainer.0", "prompts.0", "examples.0"))
    kill_actors(run, zip((f"batch.{step}" for step in range(STEPS)), victims, strict=False))
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["steps"], result["trained"], result["quarantined"]) == (STEPS, result["admitted"], 0)
    assert result["weights_fingerprint"] == weights
