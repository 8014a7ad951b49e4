"""Checks of a judge before a run starts: every impossible combination names the setting and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_actors.checks import examine
from relax_actors.checks.examine import Findings
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.rewards import load_reward
from tests.support.judges import TEMPLATE, chat_judge, plain_judge
from tests.support.running import TINY

Check = Callable[..., Findings]
READS = "reward.function={judge = 1.0, exact_match = 0.5}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_judge(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_judge(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Check the tiny configuration with a judge."""

    def find(*settings: str, reads: str = READS, **options: Any) -> Findings:
        table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        given = [reads, f"roles.judge={{{table}}}", f"run.folder={tmp_path / 'run'}", *settings]
        try:
            return examine(load_config(TINY, given))
        except ConfigError as error:
            return Findings((str(error),), ())

    return find


def test_a_judge_of_a_folder_is_accepted_and_described(check: Check, chat: Path, plain: Path) -> None:
    findings = check(model=str(chat))
    assert findings.errors == ()
    assert any("the judge has" in note and "context of 2048" in note for note in findings.notes)
    assert check(model=str(chat), answer="reason").errors == ()
    assert check(model=str(chat), mode="pairwise", reads="reward.function=judge").errors == ()
    assert check(model=str(plain), template=TEMPLATE).errors == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "nowhere"}, r"roles.judge.model .*nowhere does not exist"),
        ({"most": 10}, r"'10' begins with '1'.*lower most"),
        ({"most": 0}, r"roles.judge.most"),
        ({"rubrik": "x"}, r"unknown option of Judge; did you mean 'rubric'"),
        ({"rubric_file": "nowhere.txt"}, r"roles.judge.rubric_file = .*nowhere.txt' cannot be read"),
        ({"calibration": "nowhere.jsonl"}, r"roles.judge.calibration = .*nowhere.jsonl' cannot be read"),
        ({"least_agreement": 0.5}, r"least_agreement = 0.5 has no effect without calibration"),
        ({"template": "{prompt}"}, r"lacks \{response\}, which the judge grades"),
        ({"template": '"{prompt}" {response}'}, r"must follow \{response\}"),
        ({"template": '{prompt} "{response}"'}, r"must follow \{prompt\}"),
        ({"template": '"{response}" "{answer}"'}, r"names \{answer\}.*may name \{prompt\}, \{response\}"),
        ({"template": '{response}"{'}, r"is not a template"),
        ({"answer": "reason", "backend": "simulated"}, r'backend = "simulated" generates with the policy alone'),
        ({"answer": "reason", "max_tokens": 20}, r"has no room for a reason; set it to 48"),
        ({"rubric": "x" * 3000}, r"no room for the question.*shorten the rubric"),
    ],
)
def test_what_cannot_work_is_refused(check: Check, chat: Path, options: dict[str, Any], said: str) -> None:
    (error,) = check(**({"model": str(chat)} | options)).errors
    assert re.search(said, error), error


def test_a_model_that_cannot_read_or_write_as_a_judge_is_refused(check: Check, plain: Path, tmp_path: Path) -> None:
    (error,) = check(model=str(plain)).errors
    assert "has no chat template; write roles.judge.template" in error
    (error,) = check(model=str(plain), template=TEMPLATE, answer="reason").errors
    assert "cannot write it" in error
    assert 'use "expected"' in error
    few = plain_judge(tmp_path / "few", '0123>#"')
    (error,) = check(model=str(few), template=TEMPLATE).errors
    assert "cannot write the answer '4'" in error
    (few / "model.safetensors").unlink()
    (error,) = check(model=str(few), template=TEMPLATE).errors
    assert "has no *.safetensors" in error


def test_grades_without_a_reader_and_rewards_without_a_judge_are_refused(check: Check, chat: Path) -> None:
    (error,) = check(model=str(chat), reads="reward.function=exact_match").errors
    assert "no role reads" in error
    (error,) = check("reward.options={judge={model='m'}}", model=str(chat)).errors
    assert "reward.options.judge has no effect" in error
    with pytest.raises(ConfigError, match=r"reward.options.judge.url: is missing"):
        load_reward("judge")


def test_a_response_that_does_not_fit_is_noted(check: Check, tmp_path: Path) -> None:
    small = plain_judge(tmp_path / "small", max_position_embeddings=8)
    notes = check(model=str(small), template=TEMPLATE).notes
    assert any("cut in their middle" in note for note in notes)


def test_the_trial_call_leaves_out_the_grades(chat: Path, tmp_path: Path) -> None:
    settings = [READS, f"roles.judge.model={chat}", f"run.folder={tmp_path / 'run'}"]
    notes = examine(load_config(TINY, settings), calls=tmp_path).notes
    assert any("gives 0.5 for the answer of the first row of data, without the scores of judge" in n for n in notes)
    settings[0] = "reward.function=judge"
    assert not any(
        "the answer of the first row" in n for n in examine(load_config(TINY, settings), calls=tmp_path).notes
    )


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ("tiny_tasks.Onlooker", ""),
        ("tiny_tasks.Shaped", "reads the reward itself; set advantages.reads = 'shaped_reward'"),
        ("tiny_stateful.Auditor", "writes no column of scores"),
    ],
)
def test_a_reward_may_name_any_role_that_does_not_need_it(tmp_path: Path, actor: str, said: str) -> None:
    settings = ["reward.function={scores = 1.0}", f"roles.scores.actor={actor}", f"run.folder={tmp_path / 'run'}"]
    errors = examine(load_config(TINY, settings)).errors
    assert any(said in error for error in errors) if said else errors == ()
