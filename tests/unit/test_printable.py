"""Text of other processes cannot steer the terminal that shows it."""

from __future__ import annotations

import json
import re
import sys
import unicodedata

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from relax_actors.monitoring.render import readable
from relax_actors.monitoring.screen import Screen
from relax_actors.printable import printable, printable_lines
from relax_actors.runtime import logs
from tests.support.hostile_text import ATTACKS, steers


@pytest.mark.parametrize("text", ATTACKS)
def test_text_that_steers_a_terminal_is_escaped(text: str) -> None:
    shown = printable(text)
    assert not steers(shown)
    assert "\n" not in shown


@pytest.mark.parametrize("text", ["", "plain", "größer als 3 ≥ 2", "数学 🙂 ∑", "[red]a[/] \\n"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.slow
def test_every_character_is_shown_or_escaped() -> None:
    for code in range(sys.maxunicode + 1):
        shown = printable(chr(code))
        assert shown == chr(code) or re.fullmatch(r"(\\[bfnrt]|(\\u[0-9a-f]{4}){1,2})", shown), hex(code)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert shown != chr(code)


@given(st.text())
def test_printable_json_has_the_same_value(text: str) -> None:
    message = json.dumps({"error": text}, ensure_ascii=False)
    assert json.loads(printable(readable(message.encode("utf-8", "surrogatepass")))) == {"error": text}


def test_lines_of_others_are_indented() -> None:
    assert printable_lines("a\n\tb\x1b", "  ") == "  a\n      b\\u001b"


@pytest.mark.parametrize("text", ATTACKS)
def test_screen_writes_no_control_characters_of_what_it_prints(text: str) -> None:
    screen = Screen(width=80)
    table, tree = Table(text, title=text), Tree(text)
    table.add_row(text)
    table.add_row(Text(text))
    tree.add(text)
    with screen.capture() as captured:
        for shown in (text, table, tree):
            screen.print(shown)
        screen.show(text)
    assert not steers(captured.get())


def test_screen_reads_no_markup() -> None:
    screen = Screen(width=80)
    with screen.capture() as captured:
        screen.print("[red]a[/] [link=https://evil.invalid]b[/link] :smile: 12")
    assert captured.get() == "[red]a[/] [link=https://evil.invalid]b[/link] :smile: 12\n"


class Quoted:
    """An object whose text is what another process said."""

    def __repr__(self) -> str:
        return "\x1b[31m\nforged"


def test_log_lines_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    try:
        structlog.get_logger().warning("lost\x1b[2J", error="\u202eno\n", what=Quoted())
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not steers(said)
