"""Two on-policy runs of one seed: one undisturbed, one whose processes are killed again and again.

`python -m tests.chaos.equivalence --kills 100` prints what was killed, what it cost, and both fingerprints, and exits
with 1 if they differ. Victims, moments and pauses come from `--seed`; the moments are cells and files of the
run that is killed, so that each kill meets it in the middle of something. `--algorithm` chooses the kind of run
(`run_kinds.py`): `updates` makes several optimizer updates with each batch; `ppo` trains a critic, too, whose weights
are compared as well; `images` and `squares` train a model that looks at pictures; `turns` trains with an environment,
whose actor is killed, too, and counts turns that were generated again although they were written; `players` does so
with two players; `sft`, `dpo` and `reward_model` train rows of the data, and `lora` an adapter. `--cluster` gives the
killed run three servers with accounts, which are killed in turn.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from relax_actors.runtime import logs
from relax_actors.weights import files as weights
from tests.chaos.kill_plan import CHECKPOINT_EVERY, SERVER, Kill, plan, steps_for
from tests.chaos.run_kinds import KINDS, settings_of
from tests.support.clusters import Cluster
from tests.support.faults import Story, aimed, box, held, hit, is_over, process, story_of, wait_for_path
from tests.support.running import Run, wait_until
from tests.support.turn_counter import TurnCounter

WHILE = "in the middle of"
POOLS = ("media.0", "rollout.0", "reward.0", "advantages.0", "examples.0", "reference.0")
AIMS = 2
"""Checkpoints in a row that a kill aims at."""


@dataclass
class Tally:
    """What the victims were doing."""

    by_victim: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        """Number of kills."""
        return self.by_victim.total()


def strike(run: Run, kill: Kill, tally: Tally, cluster: Cluster | None = None) -> None:
    """Wait for the moment, kill, and record what the victim was doing."""
    if cluster is not None and kill.victim == SERVER:
        strike_server(run, kill, tally, cluster)
        return
    if kill.point.endswith("checkpoint"):
        pid = _strike_at_checkpoint(run, kill)
    elif kill.victim == "trainer.0" and kill.point.startswith("batch"):
        subject = f"relax.{run.name}.{kill.point}"
        with aimed(run, kill.victim) as strike_now:
            # A step is as short as looking up a process.
            wait_until(lambda: run.table.get(subject), kill.point, 180)
            pid = strike_now()
    else:
        subject = f"relax.{run.name}.{kill.point}"
        wait_until(lambda: run.table.get(subject) or _passed(run, kill.step), kill.point, 180)
        time.sleep(kill.pause)
        pid = hit(run, kill.victim)
    tally.by_victim[kill.victim] += 1
    if (at := _at(run, kill)) is not None:
        tally.met[f"{kill.victim} {WHILE} {at}"] += 1
    if kill.again:
        hit(run, kill.victim, other_than=pid)
        tally.by_victim[kill.victim] += 1
        tally.met[f"{kill.victim} while it recovered"] += 1


def _strike_at_checkpoint(run: Run, kill: Kill) -> int:
    """Kill a writer of checkpoints while it writes one: that of the kill's step, or of a later one if it was missed."""
    folder = _checkpoints(run, kill)
    wait_until(lambda: run.table.get(f"relax.{run.name}.batch.{kill.step - 1}"), f"batch.{kill.step - 1}", 180)
    with held(run, kill.victim) as aim:
        for step in range(kill.step, kill.step + AIMS * CHECKPOINT_EVERY, CHECKPOINT_EVERY):
            # A checkpoint is written within milliseconds, so its writer is looked up beforehand.
            wait_for_path(partial(_begun, run, folder, step), f"checkpoint {step}", 180)
            if aim.strike_while(lambda step=step: any(folder.glob(f".{step}.*.tmp"))):
                return aim.pid
        return aim.strike()


def _begun(run: Run, folder: Path, step: int) -> Path | None:
    """Return the unfinished checkpoint of a step, or the folder once the step is over."""
    for _ in range(100):  # the broker's answer takes as long as some checkpoints
        if (path := next(folder.glob(f".{step}.*"), None)) is not None:
            return path
    return folder if _passed(run, step) else None


def strike_server(run: Run, kill: Kill, tally: Tally, cluster: Cluster) -> None:
    """Kill one server of the cluster and start it again; `again` kills another as soon as it is back."""
    wait_until(lambda: run.table.get(f"relax.{run.name}.{kill.point}") or _passed(run, kill.step), kill.point, 180)
    time.sleep(kill.pause)
    for n in range(1 + kill.again):
        host = cluster.hosts[(tally.by_victim[SERVER] + n) % len(cluster.hosts)]
        cluster.kill_one(host)
        cluster.start_one(host)
        cluster.wait_until_current(run.name)
    tally.by_victim[SERVER] += 1 + kill.again


def _checkpoints(run: Run, kill: Kill) -> Path:
    return run.folder.critic_checkpoints if kill.victim == "critic.0" else run.folder.checkpoints


def _passed(run: Run, step: int) -> bool:
    return run.table.get(f"relax.{run.name}.weights.{step + 1}") is not None


def _at(run: Run, kill: Kill) -> str | None:
    """What a dead actor left unfinished; None if nothing."""
    if kill.victim in ("trainer.0", "critic.0"):
        # Only if this kill aimed at a checkpoint: an earlier kill may have left temporary files.
        if kill.point.endswith("checkpoint") and list(_checkpoints(run, kill).glob(".*.tmp")):
            return "a checkpoint"
        last = run.table.list_subjects(f"relax.{run.name}.batch.*")
        step = max(int(subject.rsplit(".", 1)[1]) for subject in last) if last else -1
        kind = "critic" if kill.victim == "critic.0" else "weights"
        done = run.table.get(f"relax.{run.name}.{kind}.{step + 1}") is not None
        return None if step < 0 or done else "a step"
    if kill.victim in POOLS and box(run, kill.victim).rows:
        return {"rollout.0": "a generation"}.get(kill.victim, "a row")
    return None


def killed_run(run: Run, kills: list[Kill], say: Any = lambda _: None, cluster: Cluster | None = None) -> Tally:
    """Start a run, carry out the kills, and leave it running."""
    tally = Tally()
    run.start()
    for n, kill in enumerate(kills, 1):
        assert not is_over(run), f"the run ended before kill {n} of {len(kills)}: {run.finish()[2]}"
        strike(run, kill, tally, cluster)
        say(f"kill {n} of {len(kills)}: {kill.victim} at {kill.point}")
    wait_until(lambda: is_over(run) or process(run, "node"), "node", 60)
    run.disconnect()
    return tally


@contextmanager
def cluster_for(run: str, folder: Path) -> Iterator[Cluster]:
    """Three servers with accounts for a run, as long as the context is open."""
    cluster = Cluster.at(folder / "keys", [f"run.name={run}"])
    cluster.make()
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def table(tally: Tally, result: dict[str, Any], story: Story, prints: tuple[str, str], seconds: float) -> str:
    """Format the report."""
    replayed = [event["replayed"] for event in story.of("recovered")]
    lines = [f"{'killed':<44}{'times':>7}"]
    lines += [f"{name:<44}{count:>7}" for name, count in sorted(tally.by_victim.items())]
    lines += [f"  {name:<42}{count:>7}" for name, count in sorted(tally.met.items())]
    ends = " + ".join(f"{name} {result[name]}" for name in ("trained", "dropped", "quarantined", "in_flight"))
    lines += [
        f"{'all':<44}{tally.kills:>7}",
        f"steps {result['steps']}, replayed {sum(replayed)} in {len(replayed)} recoveries; {seconds:.0f} s",
        f"restarts of actors, by events: {len(story.of('restarted'))}",
        f"rows: admitted {result['admitted']} = {ends}",
        f"undisturbed {prints[0]}",
        f"killed      {prints[1]}",
        "the weights are the same, bit for bit" if prints[0] == prints[1] else "THE WEIGHTS DIFFER",
    ]
    return "\n".join(lines)


def final_weights(run: Run, result: dict[str, Any]) -> str:
    """Fingerprint of the policy at the end of a run, and of the critic if there is one."""
    critic = sorted(run.folder.critic.glob("*.safetensors"))
    own = [weights.fingerprint(weights.load(critic))] if critic else []
    return " ".join([result["weights_fingerprint"], *own])


def compare(
    folder: Path,
    kills: int,
    seed: int,
    say: Any = lambda _: None,
    algorithm: str = "grpo",
    *,
    settings: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> tuple[str, Tally, dict[str, Any], Story]:
    """Run both; return the report, the tally, and the result and story of the killed run.

    Args:
        folder: holds both runs.
        kills: number of kills.
        seed: of the kills.
        say: called with a line for each kill.
        algorithm: key of `KINDS`.
        settings: settings of both runs besides `SETTINGS`.
        cluster: servers of the killed run, whose name is `killed`; None for the embedded broker.

    Raises:
        AssertionError: a run failed, or a moment did not come in time.
    """
    plans = plan(kills, seed, algorithm, cluster=cluster is not None)
    settings, config = [*settings_of(algorithm, steps_for(plans), folder), *settings], KINDS[algorithm].config
    say(f"an undisturbed run of {steps_for(plans)} steps")
    calm = Run(folder, "calm", settings, config)
    alone = calm.complete(900)
    say(f"done in {alone['seconds']:.0f} s; the same with {kills} kills")
    more = cluster.run_settings if cluster is not None else ()
    run = Run(folder, "killed", [*settings, *more], config)
    began, counter = time.monotonic(), TurnCounter(run) if algorithm in ("turns", "players") else None
    try:
        tally = killed_run(run, plans, say, cluster)
        code, result, said = run.finish(300)
        assert code == 0, said
    finally:
        run.stop()
        if counter is not None:
            counter.close()
            say(f"{len(counter.turns)} turns in {len(counter.cells)} cells, generated again: {len(counter.twice)}")
    if counter is not None:
        result["turns_twice"] = len(counter.twice)
    story, expected = story_of(run), story_of(calm).fingerprints()
    different = [version for version, print_ in sorted(story.fingerprints().items()) if expected.get(version) != print_]
    if different:
        say(f"versions that differ: {different}")
    prints = final_weights(calm, alone), final_weights(run, result)
    result |= {"alone": prints[0], "weights_fingerprint": prints[1]}
    return table(tally, result, story, prints, time.monotonic() - began), tally, result, story


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithm", choices=KINDS, default="grpo")
    parser.add_argument("--cluster", action="store_true")
    arguments = parser.parse_args()

    logs.configure(logging.ERROR)

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relax-equivalence-")))
        cluster = stack.enter_context(cluster_for("killed", folder)) if arguments.cluster else None
        text, _, result, _ = compare(
            folder, arguments.kills, arguments.seed, say, algorithm=arguments.algorithm, cluster=cluster
        )
    sys.stdout.write(text + "\n")
    return 0 if result["alone"] == result["weights_fingerprint"] else 1


if __name__ == "__main__":
    sys.exit(main())
