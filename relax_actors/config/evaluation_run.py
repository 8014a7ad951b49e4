"""The configuration of `relax eval`: a run of no steps, made from the configuration of a run that trains.

Broker, store and all actors are on this machine, and only what answers and scores is taken over.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_actors.config.evaluation import ONLY_SET
from relax_actors.errors import ConfigError

TAKEN = {
    "model": (),
    "media": (),
    "rollout": ("in_flight_updates", "group_size"),
    "environment": ("credit", "discount"),
    "agent": (),
    "gateway": (),
    "eval": ("every",),
    "reward": ("components",),
    "simulate": (),
    "supervision": (),
}
"""Sections that an evaluation takes over, without these keys, which are about training."""
TRAINER = ("backend", "options", "max_tokens_per_microbatch", "precision", "device", "torch", "megatron", "deadline")
"""Keys of [trainer], which publishes the weights that are evaluated."""
EXAMPLE = """\
  [eval]
  rows = 64
  [eval.data]
  kind = "jsonl"
  path = "held_out.jsonl\""""
RUN = ("name", "seed", "threads", "deterministic")
OPERATIONAL = ("supervision", "run")
"""Sections that do not change the answers; the keys of `RUN` but the name do."""


def evaluation_tree(tree: dict[str, Any], model: Path | None, sets: Sequence[str], source: str) -> dict[str, Any]:
    """Return the settings of an evaluation of the `sets`, or all, from those of a run.

    `model` is a model folder; None for the model with which the run starts. Errors call the settings `source`.

    Raises:
        ConfigError: there is no set of held-out prompts, or none of a given name.
    """
    taken = {
        name: _without(copy.deepcopy(tree[name]), keys) if isinstance(tree[name], dict) else tree[name]
        for name, keys in TAKEN.items()
        if name in tree
    }
    if not isinstance(taken.get("eval"), dict):
        msg = f"{source}: it has no held-out prompts to evaluate; add them, for example:\n{EXAMPLE}"
        raise ConfigError(msg)
    taken["eval"] = _chosen(taken["eval"], sets, source)
    if roles := _roles(tree, taken["eval"]):
        taken["roles"] = roles
    trainer = tree.get("trainer", {})
    taken["trainer"] = {key: value for key, value in trainer.items() if key in TRAINER}
    run = tree.get("run", {})
    taken["run"] = {key: value for key, value in run.items() if key in RUN} | {"steps": 0}
    if model is None:
        taken["data"] = copy.deepcopy(tree.get("data", {}))
        taken["trainer"] |= {"warm_start": trainer["warm_start"]} if "warm_start" in trainer else {}
    else:
        taken["model"] = {**_of_folder(taken.get("model")), "path": str(model)}
        taken["data"] = _first_data(taken["eval"])
    return _with_rewards_of_sets(taken)


def _without(section: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _of_folder(model: Any) -> dict[str, Any]:
    """Return the settings of [model] that hold for a folder, too."""
    return _without(model, ("path", "architecture", "tokenizer")) if isinstance(model, dict) else {}


def _chosen(section: dict[str, Any], sets: Sequence[str], source: str) -> dict[str, Any]:
    named = section.get("sets")
    known = list(named) if isinstance(named, dict) and named else [ONLY_SET]
    if unknown := [name for name in sets if name not in known]:
        msg = f"{source}: eval has no set {unknown[0]!r}; its sets are {', '.join(known)}"
        raise ConfigError(msg)
    if not sets or not isinstance(named, dict) or not named:
        return section
    return section | {"sets": {name: own for name, own in named.items() if name in sets}}


def _bodies(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sets with what they take from [eval]."""
    named = section.get("sets")
    if not isinstance(named, dict) or not named:
        return [section]
    return [section | own for own in named.values() if isinstance(own, dict)]


def _first_data(section: dict[str, Any]) -> Any:
    return next((copy.deepcopy(body["data"]) for body in _bodies(section) if "data" in body), {})


def _roles(tree: dict[str, Any], held_out: dict[str, Any]) -> dict[str, Any]:
    """Return the roles whose columns the answers or the rewards may read."""
    roles: dict[str, Any] = copy.deepcopy(tree.get("roles", {}))
    if any("actor" in tree.get(name, {}) for name in ("rollout", "reward")):
        return roles
    return {name: own for name, own in roles.items() if name in _rewards(held_out)}


def _rewards(held_out: dict[str, Any]) -> set[str]:
    """Return the names in the rewards of the sets."""
    rewards = [body["reward"] for body in _bodies(held_out) if "reward" in body]
    return {name for each in rewards for name in ([each] if isinstance(each, str) else each)}


def _with_rewards_of_sets(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the rewards of the sets alone, so that nothing else is loaded and called."""
    reward = tree.get("reward", {})
    rewards = [body["reward"] for body in _bodies(tree["eval"]) if "reward" in body]
    if "actor" in reward or not isinstance(reward, dict):
        return tree
    used = _rewards(tree["eval"])
    options = {name: own for name, own in reward.get("options", {}).items() if name in used}
    kept = _without(reward, ("function", "options"))
    kept |= {"options": options} if options else {}
    kept |= {"function": rewards[0]} if rewards else {}
    return tree | {"reward": kept}


def digest_of(tree: dict[str, Any], *more: str) -> str:
    """Return a digest of what the answers of an evaluation depend on: its settings, and more, such as files.

    Where it is the same, an evaluation that was stopped goes on, and a finished one is shown.
    """
    plain = {name: section for name, section in tree.items() if name not in OPERATIONAL}
    plain["run"] = {key: tree["run"].get(key) for key in RUN if key not in ("name", "threads")}
    text = json.dumps([plain, *more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
