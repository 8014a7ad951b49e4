"""The extensions in examples/ do what their pages say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.refusals import refusals
from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.config.load import stages_of
from relax_actors.data.model_folder import prepare
from relax_actors.data.prompt_maker import open_data
from relax_actors.messages import Reward, Trajectory
from relax_actors.monitoring.diagnosis import Observations
from relax_actors.monitoring.sinks import LogMessage
from relax_actors.testing import check_advantage, check_policy_loss
from tests.support.messages import assert_says

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = (EXAMPLES / "algorithms" / "presets.txt").read_text().splitlines()
HELD_OUT = [file for file in sorted(EXAMPLES.glob("*/*.toml")) if "held_out = true" in file.read_text()]
PRESETS_OF_THE_TASK = {line.split()[0]: line.split()[1:] for line in LINES if not line.startswith("#")}


def test_ranked_advantages_depend_on_the_order_of_rewards_only() -> None:
    ranked = runpy.run_path(str(EXAMPLES / "custom_estimator" / "ranked.py"))["ranked"]
    found = ranked(Group(rewards=np.array([0.1, 9.0, 0.2])))
    assert found.tolist() == [-1.0, 1.0, 0.0]
    check_advantage(ranked)


@pytest.mark.parametrize("name", [*PRESETS_OF_THE_TASK])
def test_task_can_be_trained_under_the_preset(name: str) -> None:
    settings = [f"algorithm.name={name}", *PRESETS_OF_THE_TASK[name]]
    assert list(refusals(load_config(EXAMPLES / "algorithms" / "sort_digits.toml", settings))) == []


@pytest.mark.parametrize("file", HELD_OUT, ids=lambda file: file.stem)
def test_training_never_sees_the_held_out_rows(file: Path) -> None:
    for stage in stages_of(file) or [""]:
        config = load_config(file, [f"run.stage={stage}"] if stage else [])
        assert config.eval is not None
        trained, held_out = (open_data(section, config.media) for section in (config.data, config.eval.data))
        prompts = {trained[i].prompt for i in range(len(trained))}
        assert len(held_out)
        assert [held_out[i].prompt for i in range(len(held_out)) if held_out[i].prompt in prompts] == []


def test_distillation_examples_work_with_the_model_of_the_demo(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    prepare(load_config(EXAMPLES / "demo" / "demo.toml", []), demo)
    save_file({"weight": np.zeros(1, np.float32)}, demo / "model.safetensors")
    settings = [f"run.folder={tmp_path / 'run'}", f"roles.teacher.model={demo}"]
    for name, more in (("distill", []), ("hint", [f"model.path={demo}"])):
        config = load_config(EXAMPLES / "distill" / f"{name}.toml", [*settings, *more])
        assert examine(config).errors == ()


def test_student_of_the_hint_example_reads_numbers_without_the_hint() -> None:
    make = runpy.run_path(str(EXAMPLES / "distill" / "unmarked_digits.py"))["make"]
    for task in make(size=20, seed=1):
        assert (len(task.prompt), "".join(sorted(task.prompt))) == (4, task.answer)


def test_damped_loss_is_a_policy_loss() -> None:
    damped = runpy.run_path(str(EXAMPLES / "custom_loss" / "damped.py"))["damped"]
    check_policy_loss(damped, clip_high=0.3)
    check_policy_loss(damped, clip_high=0.3, power=3.0)


def test_rule_of_ones_own_counts_negative_rewards() -> None:
    check = runpy.run_path(str(EXAMPLES / "doctor" / "negative_reward.py"))["negative_reward"]
    seen = Observations("demo", {}, steps={step: {"reward": 0.5 if step < 4 else -1.0} for step in range(12)})
    (finding,) = check(seen)
    assert_says(finding.text, "negative", "8 of 12 steps")
    assert finding.evidence[0].line() == "relax.demo.metric.trainer.0, steps 4 to 11: share 0.6667"
    seen.steps = {step: {"reward": 0.5} for step in range(12)}
    assert list(check(seen)) == []


def test_csv_sink_writes_a_line_for_each_step(tmp_path: Path) -> None:
    target = tmp_path / "steps.csv"
    sink = runpy.run_path(str(EXAMPLES / "csv_sink" / "csv_sink.py"))["CsvSink"](str(target), "demo")
    for body in ({"kind": "step", "step": 3, "reward": 0.5, "loss": 0.25}, {"role": "trainer", "n": 0}):
        message = LogMessage.parse("relax.demo.metric.trainer.0", json.dumps(body).encode())
        assert message is not None
        sink.take(message)
    sink.close()
    assert target.read_text().split() == ["demo,3,0.5,0.25"]


def test_turns_train_only_what_the_policy_sampled() -> None:
    turns = runpy.run_path(str(EXAMPLES / "samples" / "turns.py"))
    part = turns["Part"]
    read = {"prompt": [1, 2], "result": [5, 6, 7], "summary": [9]}
    sampled = {"call": [3, 4], "answer": [8]}
    parts = {name: part(np.array(ids, np.int32)) for name, ids in read.items()}
    parts |= {
        name: part(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), 3) for name, ids in sampled.items()
    }
    trajectory = turns["trajectory_of"](**parts)
    assert trajectory.counts.tolist() == [1, 2]
    assert [s.token_ids.tolist() for s in trajectory.sequences] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 9, 8],
    ]
    trained = [s.token_ids[s.loss_mask].tolist() for s in trajectory.sequences]
    assert trained == [[3, 4, 8], [3, 4], [8]]


def test_token_penalty_rewards_tokens_beyond_the_budget() -> None:
    penalty = runpy.run_path(str(EXAMPLES / "custom_role" / "token_penalty.py"))["TokenPenalty"]()
    penalty.budget = 2
    tokens, one = np.arange(4, dtype=np.int32), np.zeros(4, np.float32)
    versions = np.zeros(4, np.int32)
    trajectory = Trajectory(tokens[:1], np.array([3, 1], np.int32), tokens, one, versions, ["", ""], ["stop", "stop"])
    row = SimpleNamespace(trajectory=trajectory, reward=Reward(np.array([1.0, 0.0], np.float32)))
    reward = penalty.handle(row)
    assert reward.token_values.tolist() == [0.0, 0.0, np.float32(-0.01), 0.0]
    assert reward.lengths.tolist() == [3, 1]
