"""A judge that is slow, fails and is killed costs time alone: no row gets a wrong reward, and all arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages import Quarantined
from tests.support.faults import story_of
from tests.support.judges import TEMPLATE, plain_judge
from tests.support.kills import fetched, kill_actors
from tests.support.running import ON_POLICY, Run

MakeRun = Callable[..., Run]
READS = 'reward.function={judge = 1.0, "tiny_tasks.share_of_sevens" = 0.5}'


def judged(folder: Path, **options: str) -> tuple[str, ...]:
    table = {"model": f"'{folder}'", "template": f"'{TEMPLATE}'", "replicas": "2"} | options
    inner = ", ".join(f"{key} = {value}" for key, value in table.items())
    return (*ON_POLICY, READS, f"roles.judge={{{inner}}}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_judge_that_fails_is_slow_and_is_killed_gives_the_same_weights(make_run: MakeRun, tmp_path: Path) -> None:
    folder = plain_judge(tmp_path / "judge")
    expected = make_run("calm", *judged(folder)).complete()
    bad = judged(folder, actor="'tiny_judges.BadJudge'")
    run = make_run("killed", *bad, "supervision.max_failures=50").start()
    kills = [
        ("group.0.0.trajectory", "judge.0"),
        ("group.1.1.judge", "judge.1"),
        ("group.2.0.judge", "reward.0"),
        ("group.3.0.judge", "judge.0"),
        ("batch.4", "trainer.0"),
        ("weights.6", "judge.1"),
    ]
    kill_actors(run, kills)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected["weights_fingerprint"]
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert story_of(run).of("replay_diverged") == []


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_row_without_a_grade_is_quarantined_with_the_reason_and_never_gets_0(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = plain_judge(tmp_path / "judge")
    bad = judged(folder, actor="'tiny_judges.BadJudge'", broken="true", replicas="1")
    run = make_run("broken", *bad, "run.steps=2", "trainer.prompts_per_step=4", "trainer.checkpoint_every=2").start()
    quarantined = fetched(run, "group.0.0.quarantined", Quarantined)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"], result["dropped"]) == (8, 4, 0)
    assert quarantined.role == "judge"
    assert "no grade this time" in quarantined.error
    steps = story_of(run).steps()
    assert len(steps) == 2
    # The weights of this judge are random: no sample gets exactly 0 from it.
    assert all(step["reward/judge"] > 0 for step in steps)
