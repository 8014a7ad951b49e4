"""Roles that may join a live run, and roles that may not, each with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_actors.checks.role_addition import settings_of_addition
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest, OperationStep
from relax_actors.operations import History, State
from relax_actors.operations.log import check_request
from relax_actors.operations.plan import NodeView, wanted_by
from relax_actors.operations.progress import IDLE_SECONDS, Report, has_proved
from relax_actors.roles.fitting import check_removal
from relax_actors.supervision.role_changes import with_role, without_role
from tests.support.running import TINY

LENGTHS = "roles.lengths.actor=tiny_lengths.Lengths"


def test_settings_of_a_role_of_the_file_are_those_of_its_section() -> None:
    live, file = load_config(TINY, ["run.steps=9"]), load_config(TINY, [LENGTHS, "roles.lengths.replicas=2"])
    settings = settings_of_addition(file, live, "lengths")
    assert (settings["actor"], settings["replicas"]) == ("tiny_lengths.Lengths", 2)
    assert list(with_role(live, "lengths", settings).roles) == ["lengths"]


@pytest.mark.parametrize(
    ("role", "file", "said"),
    [
        ("rollout", [], "has a role rollout already"),
        ("lengths", [], r"no section \[roles.lengths\]; its roles are none"),
        ("lengths", [LENGTHS, "trainer.learning_rate=0.1"], r"(?s)trainer.learning_rate: .*restore these settings"),
        ("lengths", ["roles.lengths.actor=nowhere.Lengths"], "nowhere"),
        ("shaped", ["roles.shaped.actor=tiny_tasks.Shaped", "roles.shaped.replicas=0"], "replicas"),
        ("lengths", [LENGTHS, 'roles.lengths.secrets=["API_KEY"]'], "gets no secrets; put the section"),
        ("lengths", [LENGTHS, "roles.lengths.gpus=1"], "computes on GPUs"),
        ("reference", ["roles.reference.replicas=1"], "log-probs that no role reads"),
        ("auditor", ["roles.auditor.actor=tiny_stateful.Auditor", "roles.auditor.replicas=2"], "owns state"),
    ],
)
def test_role_that_does_not_fit_is_refused_with_the_reason(role: str, file: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of_addition(load_config(TINY, file), load_config(TINY), role)


def test_role_for_which_others_would_wait_is_refused() -> None:
    live = load_config(TINY, ["algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1"])
    file = load_config(TINY, ["algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1", "roles.reference.replicas=1"])
    with pytest.raises(ConfigError, match="would then wait for reference"):
        settings_of_addition(file, live, "reference")


def test_role_that_another_role_reads_is_not_removed() -> None:
    read = load_config(TINY, ["roles.shaped.actor=tiny_tasks.Shaped", "advantages.reads=shaped_reward"])
    with pytest.raises(ConfigError, match="advantages reads column shaped_reward"):
        check_removal(read, read.model_copy(update={"roles": {}}), "shaped")
    unread = load_config(TINY, [LENGTHS])
    check_removal(unread, without_role(unread, "lengths"), "lengths")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (OperationRequest("add_role", "a b", settings="{}"), "no name of a role"),
        (OperationRequest("add_role", "judge"), "table as a JSON object"),
        (OperationRequest("add_role", "judge", settings="[]"), "table as a JSON object"),
        (OperationRequest("replace_role", ""), "no name of a role"),
        (OperationRequest("move_role", "trainer"), "name the node to which trainer moves"),
    ],
)
def test_request_without_sense_is_refused(request_: OperationRequest, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_request(request_)


def test_replacement_ends_active_or_returns_and_fails() -> None:
    plan = OperationPlan(0, "main", 1, 1, ["judge.0"], "new", "old")
    first = OperationStep(1, State.PENDING, 1.0, OperationRequest("replace_role", "judge"))
    begun = History().extended([(1, first), (2, OperationStep(1, State.REPLACING, 2.0, None, plan))])
    assert begun.operations[1].shown()["code"] == {"new": "new", "old": "old"}
    assert begun.extended([(3, OperationStep(1, State.ACTIVE, 3.0))]).operations[1].is_over
    back = begun.extended([(3, OperationStep(1, State.RETURNING, 3.0, reason="it crashed"))])
    assert back.extended([(4, OperationStep(1, State.ACTIVE, 4.0))]).operations[1].state is State.RETURNING
    failed = back.extended([(4, OperationStep(1, State.FAILED, 4.0))]).operations[1]
    assert (failed.state, failed.reason) == (State.FAILED, "it crashed")


def test_code_is_proved_by_a_row_or_by_a_long_wait_for_one() -> None:
    report = Report({}, {"a.0": {"has_worked": False, "waits_for": "a row", "doing_since": 50.0}}, 0, time=51.0)
    assert not has_proved(report, ["a.0"])
    assert has_proved(replace(report, time=51.0 + IDLE_SECONDS), ["a.0"])
    assert has_proved(replace(report, leases={"a.0": {}, "a.1": {"has_worked": True}}), ["a.0", "a.1"])
    assert not has_proved(replace(report, leases={}), ["a.0"])


def test_number_that_operations_want_counts_until_the_run_starts_again() -> None:
    plan = OperationPlan(0, "main", 1, 3, ["rollout.1", "rollout.2"])
    steps = [
        OperationStep(1, State.PENDING, 10.0, OperationRequest("scale", target=3)),
        OperationStep(1, State.CREATING, 11.0, None, plan),
    ]
    history = History().extended(enumerate(steps, 1))
    node = NodeView(0, "main", 5.0, {})
    assert wanted_by(history, "rollout")(node) == 3
    assert wanted_by(history, "reward")(node) is None
    assert wanted_by(history, "rollout")(replace(node, since=12.0)) is None
    assert wanted_by(history, "rollout")(replace(node, number=1, name="far")) is None
    failed = history.extended([(3, OperationStep(1, State.FAILED, 12.0))])
    assert wanted_by(failed, "rollout")(node) == 1
