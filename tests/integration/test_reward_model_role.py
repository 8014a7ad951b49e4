"""The role reward_model: scores are those of transformers, and rewards combine them with others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from broker.codec import encode
from broker.subjects import RowId
from relax_actors.data.score_folder import read_score_folder
from relax_actors.engines.sglang import launch
from relax_actors.engines.torch.reward_model import TorchRewardModel
from relax_actors.errors import RowError
from relax_actors.messages import FinishReason, Prompt, Reward, Trajectory
from relax_actors.roles import make_role
from relax_actors.roles.reward import RewardRole
from relax_actors.runtime import Row
from tests.support.contexts import MakeContext
from tests.support.faults import command_of
from tests.support.models import ALPHABET
from tests.support.running import processes_of
from tests.support.score_folders import score_folder
from tests.support.sglang_servers import skip_if_missing

SERVED = "reward.function={reward_model=2.0,exact_match=0.5}"


def ids_of(text: str) -> np.ndarray:
    return np.array([ALPHABET.index(character) for character in text], np.int32)


def cells(texts: list[str], prompt: str = "7>", failed: tuple[int, ...] = ()) -> dict[str, bytes]:
    """Cells of a row whose samples wrote some texts and their stop tokens."""
    own = [ids_of(f"{text}#") for text in texts]
    reasons = [str(FinishReason.ERROR if i in failed else FinishReason.STOP) for i in range(len(texts))]
    total = sum(map(len, own))
    trajectory = Trajectory(
        ids_of(prompt),
        np.array([len(ids) for ids in own], np.int32),
        np.concatenate(own),
        np.full(total, -1.0, np.float32),
        np.zeros(total, np.int32),
        texts,
        reasons,
    )
    row = Prompt(prompt, ids_of(prompt), "12", {}, seed=0, min_version=0)
    return {"prompt": encode(row, "prompts.0#1"), "trajectory": encode(trajectory, "rollout.0#1")}


class Served:
    """The role in this process."""

    def __init__(self, make_context: MakeContext, model: Path, *settings: str) -> None:
        self.context = make_context("reward_model", SERVED, f"roles.reward_model.model={model}", *settings)
        self.role: Any = make_role(self.context.config, "reward_model")
        self.role.context = self.context
        self.role.setup()

    def row(self, given: dict[str, bytes], kind: str = "group") -> Row:
        return Row(RowId(0, 0, kind), given, self.context.table.store)

    def scores(self, texts: list[str], **fields: Any) -> Any:
        return self.role.handle_many([self.row(cells(texts, **fields))])[0]


def logits_of(folder: Path, text: str, *, of_steps: bool = False) -> torch.Tensor:
    """Scores of transformers at the last token, or at all tokens."""
    auto: Any = AutoModelForTokenClassification if of_steps else AutoModelForSequenceClassification
    with torch.no_grad():
        return auto.from_pretrained(folder).eval()(input_ids=torch.tensor(ids_of(text).tolist())[None]).logits[0]


def test_scores_are_those_of_transformers_in_any_batch(make_context: MakeContext, tmp_path: Path) -> None:
    folder = score_folder(tmp_path / "scores")
    served, texts = Served(make_context, folder), ["12", "7777", "", "0"]
    rows = [served.row(cells(texts)), served.row(cells(["34"], "8>")), served.row(cells(texts[:2]))]
    many = served.role.handle_many(rows)
    assert [len(reward) for reward in many] == [4, 1, 2]
    expected = [float(logits_of(folder, f"7>{text}#")[0]) for text in texts]
    np.testing.assert_allclose(many[0].values, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1e-2
    np.testing.assert_allclose(many[1].values, [float(logits_of(folder, "8>34#")[0])], rtol=0, atol=1e-5)
    np.testing.assert_allclose(many[2].values, expected[:2], rtol=0, atol=1e-5)


def test_reward_adds_the_score_with_its_weight(make_context: MakeContext, tmp_path: Path) -> None:
    served = Served(make_context, score_folder(tmp_path / "scores"))
    given = cells(["12", "77", "3"], failed=(2,))
    found: Reward = served.role.handle_many([served.row(given)])[0]
    assert found.values[2] == 0
    role = RewardRole()
    role.context = served.context
    assert "reward_model" in role.inputs(served.context.config)
    role.setup()
    reward = role.handle(served.row(given | {"reward_model": encode(found, "reward_model.0#1")}))
    np.testing.assert_allclose(reward.values, [2 * found.values[0] + 0.5, 2 * found.values[1], 0.0], rtol=1e-6)
    assert reward.components["reward_model"].tolist() == found.values.tolist()
    wrong = Reward(np.zeros(2, np.float32))
    with pytest.raises(RowError, match=r"reward_model.*3 samples"):
        role.handle(served.row(given | {"reward_model": encode(wrong, "reward_model.0#1")}))


def test_score_that_is_not_finite_is_no_reward(make_context: MakeContext, tmp_path: Path) -> None:
    folder = score_folder(tmp_path / "scores")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": tensors["score.weight"] * float("nan")}, folder / "model.safetensors")
    error = Served(make_context, folder).scores(["12"])
    assert isinstance(error, RowError)
    assert "sample 0" in str(error)
    assert "nan" in str(error)


def test_too_long_answer_is_refused_or_cut_as_the_setting_says(make_context: MakeContext, tmp_path: Path) -> None:
    folder, short = score_folder(tmp_path / "scores"), "trainer.max_tokens_per_microbatch=16"
    error = Served(make_context, folder, short).scores(["1" * 20])
    assert isinstance(error, RowError)
    assert "oversize" in str(error)
    cut = Served(make_context, folder, short, "roles.reward_model.oversize=truncate_right").scores(["1" * 20])
    np.testing.assert_allclose(cut.values, [float(logits_of(folder, "7>" + "1" * 14)[0])], rtol=0, atol=1e-5)


def test_probability_of_a_class_is_a_reward(make_context: MakeContext, tmp_path: Path) -> None:
    folder = score_folder(tmp_path / "scores", "outcome_reward", classes=3)
    shares = logits_of(folder, "7>12#").softmax(-1)
    assert Served(make_context, folder).scores(["12"]).values[0] == pytest.approx(float(shares[2]), abs=1e-6)
    first = Served(make_context, folder, "roles.reward_model.label=0", "roles.reward_model.value=score")
    odds = float(torch.log(shares[0] / (1 - shares[0])))
    assert first.scores(["12"]).values[0] == pytest.approx(odds, abs=1e-4)


def test_steps_have_a_value_each(make_context: MakeContext, tmp_path: Path) -> None:
    folder = score_folder(tmp_path / "scores", "process_reward", classes=2, step_separator=">")
    shares = logits_of(folder, "7>12>34>", of_steps=True).softmax(-1)[:, 1]
    steps = [float(shares[4]), float(shares[7])]
    # The last step has no separator of its own; its value is that of the whole answer.
    for text in ("12>34>", "12>34"):
        reward = Served(make_context, folder).scores([text])
        assert reward.values[0] == pytest.approx(min(steps), abs=1e-6)
        assert reward.token_values is None
    dense = Served(make_context, folder, "roles.reward_model.steps=tokens").scores(["12>34>", "5"])
    assert dense.lengths.tolist() == [7, 2]
    assert dense.values.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(dense.token_values[:7], [0, 0, steps[0], 0, 0, steps[1], 0], rtol=0, atol=1e-6)
    mean = Served(make_context, folder, "roles.reward_model.steps=mean").scores(["12>34>"])
    assert mean.values[0] == pytest.approx(sum(steps) / 2, abs=1e-6)


def test_row_that_cannot_be_scored_costs_only_itself(make_context: MakeContext, tmp_path: Path) -> None:
    served = Served(make_context, score_folder(tmp_path / "scores"), "trainer.max_tokens_per_microbatch=16")
    good, bad = served.row(cells(["12"])), served.row(cells(["1" * 30]))
    found = served.role.handle_many([bad, good])
    assert isinstance(found[0], RowError)
    assert found[1].values.tolist() == served.role.handle_many([good])[0].values.tolist()


def test_rows_whose_reward_does_not_name_the_role_are_not_scored(make_context: MakeContext, tmp_path: Path) -> None:
    held_out = ("eval.reward=exact_match", "eval.data.kind=python", "eval.data.function=tiny_tasks.make")
    served = Served(make_context, score_folder(tmp_path / "scores"), *held_out)
    given = cells(["12", "34"])
    evaluated, trained = served.role.handle_many([served.row(given, "eval"), served.row(given)])
    assert evaluated is None
    assert len(trained) == 2
    assert served.role.metrics()["scored_samples"] == 2


def test_engine_says_which_version_it_has(make_context: MakeContext, tmp_path: Path) -> None:
    folder = score_folder(tmp_path / "scores")
    config = make_context("reward_model", SERVED, f"roles.reward_model.model={folder}").config
    engine = TorchRewardModel(config, folder, read_score_folder(folder, "model"))
    assert engine.version == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_server_of_sglang_gives_the_scores_of_transformers_and_is_replaced(
    make_context: MakeContext, tmp_path: Path
) -> None:
    skip_if_missing()
    folder, texts = score_folder(tmp_path / "scores"), ["12", "7777", "", "0"]
    settings = (f"roles.reward_model.model={folder}", "roles.reward_model.backend=sglang")
    context = make_context("reward_model", SERVED, *settings, "supervision.start_deadline=400")
    context.folder.save_config(context.config, str(tmp_path))
    role: Any = make_role(context.config, "reward_model")
    role.context = context
    role.setup()
    try:
        row = Row(RowId(0, 0, "group"), cells(texts), context.table.store)
        expected = [float(logits_of(folder, f"7>{text}#")[0]) for text in texts]
        for _ in range(2):
            (reward,) = role.handle_many([row])
            np.testing.assert_allclose(reward.values, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
            server = next(pid for pid in processes_of(context.folder.root) if launch.__name__ in command_of(pid))
            os.killpg(os.getpgid(server), signal.SIGKILL)
    finally:
        role.close()
