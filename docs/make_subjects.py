"""Write docs/subjects.md from the code that builds, writes and guards subjects: `python docs/make_subjects.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import decode_fields, encode, open_envelope
from broker.fields import TensorRef
from broker.permissions import NODE, OBSERVER, OPERATOR
from broker.subjects import RowId, Subjects
from relax_actors import messages
from relax_actors.config import Config
from relax_actors.config.media import MediaSection
from relax_actors.messages.cells import SetResult
from relax_actors.messages.operations import OPERATION, OperationPlan, OperationStep
from relax_actors.messages.profile import ProfileAnswer, ProfileCall
from relax_actors.messages.ranks import RankAnswer, RankInvitation
from relax_actors.monitoring.render import fields_of
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, numbered_cells, table_kinds
from relax_actors.roles.permissions import permissions, users
from relax_actors.runtime import COLUMNS

TARGET = Path(__file__).parent / "subjects.md"
ROW, AUTHOR = RowId(12, 3), "rollout.0#1"
SCORING_ROLES = [name for name in ROLES.built_in if built_in_spec(name).section == "roles"]
FLOATS, INTS = np.array([-0.25, -0.5], np.float32), np.array([5, 3], np.int32)
FINGERPRINT = "5f0c1a7d93b24e68a1d0c7f2e9b84d36"

REQUESTS = (
    messages.EnvironmentRequest([messages.Open("group.12.3/0/0", {"answer": "35"}, 77)], [], ["group.11.2/0/0"]),
    messages.EnvironmentAnswers(
        [messages.EnvironmentAnswer("group.12.3/0/0", -1, [{"role": "user", "content": "53"}])]
    ),
)

INVITATIONS = (
    RankInvitation("5b3f09d2c1a87e64", 3, "torch 2.13.0", FINGERPRINT[:16], 1, "10.0.0.5", 40123, "8d1c"),
    RankAnswer("10.0.0.7"),
)
PROFILES = (
    ProfileCall(2, 600.0),
    ProfileAnswer("written", host="gpu-1", files=["runs/demo/profiles/trainer.0-1-0.json.gz"]),
)
# One example of each kind of cell.
EXAMPLES: dict[str, Any] = {
    "prompt": messages.Prompt("53>", INTS, "35", {}, 77, 11),
    "media": messages.PreparedPrompt(
        np.array([21, 22, 22, 23], np.int32),
        [
            messages.Media(
                "image",
                0,
                TensorRef("group/12/media.9be2.safetensors", 4096, 3072, "uint8", (16, 192), FINGERPRINT),
                np.array([1, 4, 4], np.int32),
                1,
                2,
            )
        ],
        np.zeros((3, 4), np.int32),
        -1,
    ),
    "trajectory": messages.Trajectory(
        INTS, np.array([2], np.int32), INTS, FLOATS, np.array([11, 11], np.int32), ["35"], ["stop"], [FINGERPRINT]
    ),
    "reward": messages.Reward(np.array([1.0], np.float32)),
    "advantage": messages.Advantage(np.array([0.7], np.float32), 0.5),
    "teacher": messages.TeacherScores(FLOATS, INTS[:, None], FLOATS[:, None]),
    "dropped": messages.Dropped("no_signal", "all samples have reward 0"),
    "quarantined": messages.Quarantined("reward", 3, "ValueError: no number", "Traceback ..."),
    "requeued": messages.Requeued(1.7e9),
    "readmitted": messages.Readmitted("group.14.5"),
    "batch": messages.Batch([0, 1, 2, 3], 99, 1, 0.5, 1, 512, 1.7e9),
    "weights": messages.Weights(12, FINGERPRINT, [messages.Shard("weights/12.1.safetensors", 4096, FINGERPRINT)], 1),
    "checkpoint": messages.Checkpoint(12, "checkpoints/12.1", FINGERPRINT, 9, messages.RowCounts(40, 36, 4, 0), 1),
    "evaluation": messages.Evaluation(12, 0.75, 256, {"sums": SetResult(256, 0.75, 0.75)}),
    "critic": messages.CriticVersion(12, FINGERPRINT, 1),
    OPERATION: OperationStep(12, "CREATING", 1.7e9, None, OperationPlan(0, "main", 1, 2, ["rollout.1"])),
    "critic_checkpoint": messages.Checkpoint(12, "critic-checkpoints/12.1", FINGERPRINT, 12, messages.RowCounts(), 1),
}
LOG_PROBS = "Log-probs `[total] float32`, in the layout of the trajectory's own."
MEANINGS = {
    "judge": "Grades of the samples from 0 to 1: a `Reward` as in the column `reward`.",
    "reward_model": "Scores of the samples by the reward model: a `Reward` as in the column `reward`.",
    "squares": "Sums of squared probabilities of the vocabulary, `[total] float32`, as the log-probs are.",
}
TITLES = {
    "node": ", about once a second: figures of its machine; of its GPUs the mean utilisation, the least free memory, "
    "the highest temperature, the power of all",
    "step": ", of each step",
}
LOG = {
    "event": {"time": 1.7e9, "kind": "ready", "role": "rollout", "n": 0, "seconds": 1.2},
    "metric": {
        "time": 1.7e9,
        "role": "rollout",
        "n": 0,
        "rows": 64,
        "rows_per_second": 8.0,
        "busy": 0.9,
        "rss_mib": 512,
    },
    "node": {
        "time": 1.7e9,
        "role": "node",
        "n": 0,
        "kind": "supervision",
        "restarts": {"rollout.0": 1},
        "load": 3.2,
        "memory_free_mib": 90112,
        "disk_free_mib": 51200,
        "gpu_busy": 0.87,
        "gpu_memory_free_mib": 20480.0,
        "gpu_celsius": 61,
        "gpu_watts": 1240,
    },
    "step": {
        "time": 1.7e9,
        "role": "trainer",
        "n": 0,
        "kind": "step",
        "step": 12,
        "reward": 0.5,
        "staleness": 1,
        "loss": 0.01,
        "by_micro_batch": {"tokens": [96.0, 80.0], "loss": [0.012, 0.0076]},
    },
}


def example(name: str, subject: str | None = None) -> str:
    """Fields of an encoded and decoded cell, as `relax tail` prints them."""
    value = EXAMPLES[name]
    data = encode(value, AUTHOR, subject=subject)
    decode_fields(open_envelope(data, subject=subject), type(value))
    return fields_of(data)


def meaning(cls: type) -> str:
    """First paragraph of a class's docstring, in one line."""
    text = " ".join((cls.__doc__ or "").split("\n\n", 1)[0].split())
    said = text.partition(": ")[2] or text
    return said[:1].upper() + said[1:]


def config() -> Config:
    """A run with all built-in roles, although no single run has both media and environments."""
    data = {"kind": "python", "function": "none.make"}
    tree = {
        "run": {"name": "demo"},
        "model": {"path": "model"},
        "data": data,
        "eval": {"data": data},
        "critic": {},
        "environment": {"name": "none.Game"},
        "gateway": {},
        "autoscaler": {"max": 4},
        "trainer": {"backend": "megatron", "megatron": {"ranks": 2, "local_ranks": 1}},
        "roles": {name: {} for name in SCORING_ROLES},
    }
    return Config.model_validate(tree).model_copy(update={"media": MediaSection()})


def cells(subjects: Subjects) -> list[str]:
    """Section about the table."""
    lines = []
    for name, cls in COLUMNS.items():
        subject = subjects.cell(ROW, name)
        pattern = subject.replace(str(ROW), "group.<step>.<index>")
        lines += [f"### `{pattern}`", "", f"{meaning(cls)} Fields: {fields(cls)}.", "", "```", example(name), "```", ""]
    for name in (name for name in SCORING_ROLES if built_in_spec(name).writes and name not in COLUMNS):
        pattern = subjects.cell(ROW, name).replace(str(ROW), "group.<step>.<index>")
        lines += [f"### `{pattern}`", "", MEANINGS.get(name, LOG_PROBS), ""]
    values = subjects.cell(ROW, "values").replace(str(ROW), "group.<step>.<index>")
    lines += [f"### `{values}`", "", "Values of the critic, `[total] float32`, in the same layout.", ""]
    again = subjects.cell(ROW, "redeliver-role").replace(str(ROW), "group.<step>.<index>").replace("-role", "-<role>")
    lines += [f"### `{again}`", "", f"{meaning(messages.Redelivery)} Fields: {fields(messages.Redelivery)}.", ""]
    turns = subjects.turn(ROW, 0, 1).replace(f"{ROW}.turns.0.1", "group.<step>.<index>.turns.0.<k>")
    lines += [f"### `{turns}`", "", f"{meaning(messages.SessionLog)} Fields of a turn: {fields(messages.Turn)}.", ""]
    for kind, cls in numbered_cells().items():
        number = {"batch": "step", OPERATION: "number"}.get(kind, "version")
        lines += [f"### `{subjects.numbered(kind, f'<{number}>')}`", ""]
        lines += [f"{meaning(cls)} Fields: {fields(cls)}.", ""]
        if kind in EXAMPLES:
            lines += ["```", example(kind, subjects.numbered(kind, 12)), "```", ""]
    return lines


def fields(cls: type) -> str:
    """Names of the fields of a class."""
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(cls))


def listed(names: list[str]) -> str:
    """Names as inline code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def exchanged(values: tuple[Any, ...]) -> list[str]:
    """A line for each kind of message, with an example."""
    return [
        f"- {meaning(type(value))} Fields: {fields(type(value))}. `{fields_of(encode(value, AUTHOR))}`"
        for value in values
    ]


def rights(run: Config) -> list[str]:
    """Section about the permissions of each user."""
    lines = []
    said = {
        NODE: "the supervisor of a node",
        OPERATOR: "starts, inspects and repairs the run",
        OBSERVER: "subscribes to the whole run, and reads stored messages by pages, which the server bounds",
    }
    for user in users(run):
        allowed = permissions(run, user)
        lines += [f"### {user}", "", *([f"{said[user][:1].upper()}{said[user][1:]}.", ""] if user in said else [])]
        lines += ["```", *(f"pub {subject}" for subject in allowed.publish)]
        lines += [f"pub not {subject}" for subject in allowed.withheld]
        lines += [f"sub {subject}" for subject in allowed.subscribe]
        lines += [*(f"answer {subject}" for subject in allowed.serves), "```", ""]
    return lines


def requests(subjects: Subjects) -> list[str]:
    """Lines on the requests between roles."""
    return [
        "## Requests",
        "",
        f"`{subjects.service('env', '<n>')}`: operations on sessions of actor `n` of the role `environment`, in no",
        "stream. The answers go to the request's reply subject, in as many messages as there are moments in which some",
        "are ready. Both are encoded as cells.",
        "",
        *exchanged(REQUESTS),
        "",
        f"`{subjects.service('trainer_rank', '<n>')}`: invitation of actor `n` of the role `trainer_rank` to a group",
        "of ranks, and its answer.",
        "",
        *exchanged(INVITATIONS),
        "",
        f"`{subjects.service('profile_trainer', '<n>')}`, `{subjects.service('profile_rollout', '<n>')}`: request of",
        "an operator to profile the next steps of an actor, and the answers, one a second until its traces are there.",
        "",
        *exchanged(PROFILES),
        "",
    ]


def state(subjects: Subjects) -> list[str]:
    """Lines on the bucket of the state."""
    return [
        "## The state",
        "",
        f"KV bucket `{subjects.state_bucket}`, JSON: `lease.<role>.<n>` (live actors; expires after",
        "`supervision.heartbeat` seconds), `incarnation.<role>.<n>` (number of incarnations), `failure.<role>.<row>`",
        "(number of failures), `note.<name>` (address of a role), `run` (settings, without those of the broker, for",
        "nodes that join).",
        "",
        "## Permissions",
        "",
        "Credentials written by `relax keys` grant exactly these permissions.",
        "",
    ]


def page() -> str:
    """Text of the page."""
    run = config()
    subjects = Subjects(run.run.name)
    head = [
        "# Subjects",
        "",
        "Generated by `python docs/make_subjects.py` from `broker/subjects.py`, `relax_actors/messages`, the specs of",
        "the roles and `relax_actors/roles/permissions.py`, for a run of the name `demo`.",
        "",
        "## The table",
        "",
        f"Stream `{subjects.table_stream}`: "
        + ", ".join(f"`{subject}`" for subject in subjects.table_subjects(table_kinds()))
        + ".",
        "Each subject holds one message, which is written once: msgpack `[schema, type, author, fields]`, followed in",
        "numbered cells by a checksum over subject and content. The examples are fields as `relax tail` prints them.",
        "Rows of `eval.<version>.<index>` have the columns `prompt`, `trajectory`, `reward` and `quarantined`.",
        "",
        *cells(subjects),
        "## The log",
        "",
        f"Stream `{subjects.log_stream}`: "
        + ", ".join(f"`{subject}`" for subject in subjects.log_subjects())
        + ". JSON.",
        "",
    ]
    for name, subject in (
        ("event", subjects.event("<role>", "<n>", "<kind>")),
        ("metric", subjects.metric("<role>", "<n>")),
        ("node", subjects.metric("node", "<n>")),
        ("step", subjects.metric("trainer", "0")),
    ):
        title = f"### `{subject}`" + TITLES.get(name, "")
        lines = [title, "", "```json", json.dumps(LOG[name]), "```", ""]
        head += lines
    return "\n".join([*head, *requests(subjects), *state(subjects), *rights(run)]).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
