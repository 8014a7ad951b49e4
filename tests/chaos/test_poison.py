"""Rows that break the actor that handles them are quarantined and replaced; every step has all of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_actors.messages import Quarantined
from tests.support.faults import story_of
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
QUICK = (
    "supervision.ack_wait=1",
    "supervision.intensity=100",
    "supervision.max_failures=2",
    "supervision.backoff_max=0.2",
    "run.steps=4",
)


def finished_with_quarantine(run: Run) -> list[Quarantined]:
    """Run to the end; return the cells of quarantined rows."""
    run.start()
    wait_until(lambda: run.table.get(f"relax.{run.name}.weights.0"), "weights.0", 90)
    found: dict[str, Quarantined] = {}
    column = run.table.subjects.column("quarantined")

    def over() -> bool:
        assert run.process is not None
        if run.process.poll() is not None:
            return True
        if run.table.get(f"relax.{run.name}.checkpoint.4") is None:
            found.update(
                {str(c.row): run.table.read(cell.data, Quarantined) for c, cell in run.table.snapshot([column])}
            )
            return False
        return True

    wait_until(over, "end of the run", 120)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 16
    assert result["quarantined"] >= 1
    assert {len(batch.rows) for batch in story_of(run).values("batch").values()} == {4}
    assert result["admitted"] == result["trained"] + result["quarantined"] + result["dropped"]
    return list(found.values())


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        pytest.param("poison_nan", "nan", marks=pytest.mark.slow),
        pytest.param("poison_string", "good", marks=pytest.mark.slow),
        pytest.param("poison_raise", "RuntimeError: this reward cannot", marks=pytest.mark.slow),
        pytest.param("poison_exit", "SystemExit", marks=pytest.mark.slow),
        pytest.param("poison_segfault", "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("poison_hang", "no progress", marks=pytest.mark.slow),
        pytest.param("poison_spin", "no progress", marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_failing_reward_are_quarantined_and_the_run_continues(
    make_run: MakeRun, reward: str, error: str
) -> None:
    run = make_run(reward, *QUICK, f"reward.function=tiny_tasks.{reward}", "reward.deadline=1")
    quarantined = finished_with_quarantine(run)
    assert quarantined
    assert all(q.role == "reward" for q in quarantined)
    assert all(error in q.error + q.traceback for q in quarantined), quarantined


@pytest.mark.slow
def test_reward_over_its_memory_limit_fails_alone(make_run: MakeRun) -> None:
    run = make_run("greedy", *QUICK, "reward.function=tiny_tasks.poison_memory", "reward.memory_limit_mib=400")
    quarantined = finished_with_quarantine(run)
    assert quarantined
    assert all(q.role == "reward" for q in quarantined)
    assert all("memory" in (q.error + q.traceback).lower() for q in quarantined), quarantined


@pytest.mark.slow
def test_custom_role_that_hangs_is_killed_and_its_row_replaced(make_run: MakeRun) -> None:
    run = make_run(
        "critic",
        *QUICK,
        "roles.critic.actor=tiny_tasks.Critic",
        "roles.critic.deadline=1",
        "advantages.reads=shaped_reward",
    )
    quarantined = finished_with_quarantine(run)
    assert quarantined
    assert all((q.role, q.deliveries) == ("critic", 2) for q in quarantined), quarantined
    assert all("no progress" in q.error + q.traceback for q in quarantined)


@pytest.mark.slow
def test_prompts_beyond_the_context_are_quarantined(make_run: MakeRun) -> None:
    run = make_run("long", *QUICK, "data.function=tiny_tasks.with_long_prompts", "data.size=40")
    quarantined = finished_with_quarantine(run)
    assert any("100 tokens" in q.error and "rollout.max_tokens" in q.error for q in quarantined)


@pytest.mark.slow
def test_failures_of_an_observing_role_do_not_delay_the_run(make_run: MakeRun) -> None:
    run = make_run("onlooker", *QUICK, "roles.onlooker.actor=tiny_tasks.Onlooker")
    run.start()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 16
    assert result["admitted"] == result["trained"] + result["quarantined"] + result["dropped"] + result["in_flight"]
