"""Which process is killed at which moment of a run: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

STRIDE = 1
FIRST = 2
CHECKPOINT_EVERY = 3
# Weight of each victim, and its moments: cells of step k after which the victim is at work.
POINTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "trainer.0": (6, ("batch.{k}", "batch.{k}", "checkpoint", "checkpoint", "group.{k}.3.advantage")),
    "rollout.0": (4, ("group.{k}.0.prompt", "group.{k}.1.trajectory")),
    "reward.0": (3, ("group.{k}.0.trajectory", "group.{k}.1.reward")),
    "advantages.0": (2, ("group.{k}.0.reward",)),
    "prompts.0": (2, ("weights.{k}", "group.{k}.0.prompt")),
    "node": (2, ("batch.{k}", "group.{k}.1.trajectory")),
    "zygote": (1, ("weights.{k}",)),
    "broker": (1, ("batch.{k}", "group.{k}.0.prompt")),
}
SERVER = "server"
SERVER_POINTS = (4, ("batch.{k}", "group.{k}.0.prompt", "group.{k}.1.trajectory", "weights.{k}"))
"""Weight and moments of the servers of a cluster, which takes the place of the embedded broker."""
CRITIC_POINTS = ("group.{k}.1.trajectory", "batch.{k}", "batch.{k}", "critic.{k}", "critic checkpoint")
ENVIRONMENT_POINTS = ("group.{k}.0.prompt", "group.{k}.1.prompt", "group.{k}.0.turns.0.1", "group.{k}.2.turns.0.0")
BROKER_POINTS = ("group.{k}.0.turns.0.1", "group.{k}.2.turns.0.0", "group.{k}.0.prompt", "batch.{k}")
"""Moments of the broker in runs with episodes."""
TURN_POINTS = ("group.{k}.0.prompt", "group.{k}.0.turns.0.0", "group.{k}.1.turns.0.2", "group.{k}.3.turns.0.1")
MEDIA_POINTS = ("weights.{k}", "group.{k}.0.prompt", "group.{k}.2.prompt", "group.{k}.0.media")
ROWS_OF_DATA = ("sft", "dpo", "reward_model")
"""Runs without a rollout."""
EXAMPLE_POINTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "trainer.0": (6, ("batch.{k}", "batch.{k}", "checkpoint", "group.{k}.3.trajectory")),
    "examples.0": (4, ("group.{k}.0.prompt", "group.{k}.1.trajectory")),
    "prompts.0": POINTS["prompts.0"],
    "node": (2, ("batch.{k}", "group.{k}.1.trajectory")),
    "zygote": POINTS["zygote"],
    "broker": POINTS["broker"],
}
REFERENCE_POINTS = ("group.{k}.0.trajectory", "group.{k}.1.reference", "batch.{k}")
AGAIN = 0.2  # share of kills whose next incarnation is killed too, as soon as it has a process


@dataclass(frozen=True)
class Kill:
    """A planned kill `pause` seconds after `point`; with `again` the next incarnation is killed too."""

    victim: str
    point: str
    step: int
    pause: float
    again: bool


def points_of(algorithm: str, *, cluster: bool = False) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Victims and moments of the runs of an algorithm."""
    if algorithm in ROWS_OF_DATA:
        return EXAMPLE_POINTS | ({"reference.0": (5, REFERENCE_POINTS)} if algorithm == "dpo" else {})
    found = dict(POINTS) | ({"critic.0": (6, CRITIC_POINTS)} if algorithm == "ppo" else {})
    if algorithm in ("images", "squares"):
        found["media.0"] = (8, MEDIA_POINTS)
    if algorithm in ("turns", "players"):
        found |= {"environment.0": (6, ENVIRONMENT_POINTS), "rollout.0": (8, TURN_POINTS)}
        found["broker"] = (5, BROKER_POINTS)
    if cluster:
        del found["broker"]
        found[SERVER] = SERVER_POINTS
    return found


def plan(kills: int, seed: int, algorithm: str = "grpo", *, cluster: bool = False) -> list[Kill]:
    """Draw kills from a seed, each in a later step than the one before."""
    source = random.Random(seed)
    points = points_of(algorithm, cluster=cluster)
    names = list(points)
    chances = [points[name][0] for name in names]
    found: list[Kill] = []
    step = FIRST
    done = 0
    while done < kills:
        victim = source.choices(names, chances)[0]
        again = source.random() < AGAIN and done + 1 < kills
        at = step
        point = source.choice(points[victim][1])
        if point.endswith("checkpoint"):
            step = at = -(-step // CHECKPOINT_EVERY) * CHECKPOINT_EVERY
        found.append(Kill(victim, point.format(k=at), at, source.uniform(0.0, 0.06), again))
        done += 1 + again
        step += STRIDE
    return found


def steps_for(kills: list[Kill]) -> int:
    """Number of steps that leaves room for all kills, also for one that misses its checkpoint and aims at the next."""
    return kills[-1].step + FIRST + CHECKPOINT_EVERY
