"""Subjects: parsing inverts building, and no other subject is accepted."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import SubjectError
from broker.subjects import RESERVED, CellId, Kinds, RowId, Subjects, check_name

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
NUMBERS = st.integers(0, 10**18 - 1)
KINDS = Kinds(("group", "held_out"), ("batch", "floor"))
ROWS = st.builds(RowId, NUMBERS, NUMBERS, st.sampled_from(KINDS.rows))
SUBJECTS = Subjects("demo")


def matches(subject: str, pattern: str) -> bool:
    """Match as NATS does: `*` is one token, `>` the rest."""
    names, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        return len(names) >= len(wanted) and matches(".".join(names[: len(wanted) - 1]), ".".join(wanted[:-1]))
    return len(names) == len(wanted) and all(w in ("*", n) for n, w in zip(names, wanted, strict=True))


@given(ROWS)
def test_row_id_round_trips_through_its_text(row: RowId) -> None:
    assert RowId.parse(str(row)) == row


@given(NAMES, ROWS, NAMES)
def test_cell_id_round_trips_through_its_subject(run: str, row: RowId, field: str) -> None:
    found = Subjects(run).parse(Subjects(run).cell(row, field))
    assert found == CellId(row.kind, row.step, row.index, field)
    assert found.row == row


@given(ROWS, NUMBERS, NUMBERS)
def test_turn_cell_round_trips_and_matches_the_filters_of_its_row_and_the_table(
    row: RowId, attempt: int, k: int
) -> None:
    subject = SUBJECTS.turn(row, attempt, k)
    cell = SUBJECTS.parse(subject)
    assert (cell.row, cell.field) == (row, f"turns.{attempt}.{k}")
    assert matches(subject, SUBJECTS.row(row))
    assert matches(subject, SUBJECTS.turns(row.kind))
    assert sum(matches(subject, pattern) for pattern in SUBJECTS.table_subjects(KINDS)) == 1


@given(NAMES, st.sampled_from(KINDS.numbered), NUMBERS)
def test_numbered_cell_id_round_trips_through_its_subject(run: str, kind: str, number: int) -> None:
    assert Subjects(run).parse(Subjects(run).numbered(kind, number)) == CellId(kind, number)


@given(st.text(max_size=40))
def test_any_text_is_a_row_id_or_refused(text: str) -> None:
    try:
        row = RowId.parse(text)
    except SubjectError as error:
        assert "does not name a row" in str(error)  # noqa: PT017 otherwise it must be a row
    else:
        assert str(row) == text


@given(
    st.lists(
        st.sampled_from(["relax", "demo", "group", "eval", "batch", "turns", "0", "7", "01", "-1", "", "x", "*", ">"])
    )
)
def test_every_cell_has_exactly_one_subject(parts: list[str]) -> None:
    subject = ".".join(parts)
    try:
        cell = SUBJECTS.parse(subject)
    except SubjectError as error:
        assert "does not name a cell of run 'demo'" in str(error)  # noqa: PT017 otherwise it must be a cell
    else:
        turn = cell.field.startswith("turns.")
        again = SUBJECTS.cell(cell.row, cell.field) if cell.field and not turn else ""
        again = SUBJECTS.turn(cell.row, *cell.field.split(".")[1:]) if turn else again
        again = again or SUBJECTS.numbered(cell.kind, cell.step)
        assert again == subject


@given(ROWS, NAMES)
def test_cell_matches_the_filters_of_its_column_row_and_table(row: RowId, field: str) -> None:
    subject = SUBJECTS.cell(row, field)
    assert matches(subject, SUBJECTS.column(field, row.kind))
    assert matches(subject, SUBJECTS.row(row))
    assert sum(matches(subject, pattern) for pattern in SUBJECTS.table_subjects(KINDS)) == 1
    assert not any(matches(subject, pattern) for pattern in SUBJECTS.log_subjects())


@pytest.mark.parametrize("kind", KINDS.numbered)
def test_numbered_cell_matches_its_filter_and_the_table(kind: str) -> None:
    subject = SUBJECTS.numbered(kind, 12)
    assert matches(subject, SUBJECTS.numbered(kind, "*"))
    assert sum(matches(subject, pattern) for pattern in SUBJECTS.table_subjects(KINDS)) == 1


def test_events_and_metrics_belong_to_the_log_not_to_the_table() -> None:
    for subject in (SUBJECTS.event("rollout", 0, "crashed"), SUBJECTS.metric("rollout", 0)):
        assert sum(matches(subject, pattern) for pattern in SUBJECTS.log_subjects()) == 1
        assert not any(matches(subject, pattern) for pattern in SUBJECTS.table_subjects(KINDS))
        with pytest.raises(SubjectError, match="does not name a cell of run 'demo'"):
            SUBJECTS.parse(subject)


@given(NAMES)
def test_stream_names_of_a_run_are_distinct_and_contain_its_name(run: str) -> None:
    subjects = Subjects(run)
    names = {subjects.table_stream, subjects.log_stream, subjects.state_bucket}
    assert len(names) == 3
    assert all(run in name for name in names)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "*", ">", "ä", "a\n", "x" * 65, "a/b", "\0"])
def test_invalid_name_is_refused_with_the_allowed_characters(name: str) -> None:
    with pytest.raises(SubjectError, match="use 1 to 64 letters, digits, '-' or '_'") as caught:
        check_name(name, "field")
    assert repr(name) in str(caught.value)
    with pytest.raises(SubjectError, match="run name"):
        Subjects(name)
    with pytest.raises(SubjectError, match="field"):
        SUBJECTS.cell(RowId(0, 0), name)


@pytest.mark.parametrize(
    "subject",
    [
        "relax.other.group.1.2.prompt",
        "relax.demo.group.1.2",
        "relax.demo.group.1.2.prompt.x",
        "relax.demo.group.01.2.prompt",
        "relax.demo.group.-1.2.prompt",
        "relax.demo.group.1.2.pro mpt",
        "relax.demo.group.٣.2.prompt",
        "relax.demo.batch.x",
        "relax.demo.event.1",
        "relax.demo.event.0.1.x",
        "batch.1",
        "relax.1",
        "relax.demo.batch.1.2",
        "relax.demo.batch." + "9" * 19,
        "relax.demo2.batch.1",
        "relax.demo",
        "",
    ],
)
def test_subject_of_another_form_or_run_is_refused(subject: str) -> None:
    with pytest.raises(SubjectError, match="does not name a cell of run 'demo'") as caught:
        SUBJECTS.parse(subject)
    assert repr(subject) in str(caught.value)


@pytest.mark.parametrize("text", ["group.1", "group.1.2.3", "event.1.2", "group.01.2", "group.1.-2", "group.1.2\n", ""])
def test_malformed_row_id_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(SubjectError, match=r"a row is <kind>\.<step>\.<index>, such as group\.12\.3"):
        RowId.parse(text)


@pytest.mark.parametrize("kind", [*RESERVED, "*", ">", "a.b", ""])
def test_kind_that_cannot_name_cells_is_refused(kind: str) -> None:
    for build in (
        lambda: SUBJECTS.numbered(kind, 1),
        lambda: SUBJECTS.table_subjects(Kinds(rows=(kind,))),
        lambda: SUBJECTS.table_subjects(Kinds(numbered=(kind,))),
    ):
        with pytest.raises(SubjectError, match=rf"kind '{re.escape(kind)}' cannot"):
            build()


@given(NAMES, NUMBERS)
def test_requests_belong_to_no_stream_and_name_no_cell(kind: str, n: int) -> None:
    subject = SUBJECTS.service(kind, n)
    assert not any(matches(subject, pattern) for pattern in (*SUBJECTS.table_subjects(KINDS), *SUBJECTS.log_subjects()))
    with pytest.raises(SubjectError, match="does not name a cell"):
        SUBJECTS.parse(subject)


def test_rows_are_ordered_by_step_then_index() -> None:
    assert sorted([RowId(1, 0), RowId(0, 9), RowId(0, 10)]) == [RowId(0, 9), RowId(0, 10), RowId(1, 0)]
