"""The section of a mixture: what it refuses, how long its epochs are, and what `relax check` notes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from relax_actors.checks import examine
from relax_actors.config import Config, load_config, validate
from relax_actors.data.epochs import with_epochs
from relax_actors.errors import ConfigError
from tests.support.running import SUPPORT

MIXED = """
[data]
kind = "mixture"
[data.mixture.a]
kind = "python"
function = "tiny_tasks.make"
size = 60
weight = 0.6
[data.mixture.b]
kind = "python"
function = "tiny_tasks.make"
size = 10
weight = 0.4
"""
PLAIN = '[data]\nkind = "python"\nfunction = "tiny_tasks.make"\nsize = 30\n'


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the tiny run on examples with a mixture in place of its data, with a part of it replaced."""
    monkeypatch.syspath_prepend(SUPPORT)
    whole = (SUPPORT / "tiny_examples.toml").read_text()
    assert PLAIN in whole

    def load(*settings: str, old: str = "", new: str = "", more: str = "") -> Config:
        path = tmp_path / "mixed.toml"
        path.write_text(whole.replace(PLAIN, MIXED.replace(old, new) + more))
        return load_config(path, list(settings))

    return load


CURRICULUM = "\n[[data.curriculum]]\nstep = {}\nweights = {{ {} }}\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "0.4", "new": "0.3"}, r"data\.mixture: the weights add up to 0\.9, not to 1; .* 0\.6667, 0\.3333"),
        ({"old": "weight = 0.4", "new": ""}, "b has no weight, and a has one; give all of them one, or none"),
        (
            {"old": '[data]\nkind = "mixture"', "new": '[data]\nkind = "mixture"\nsize = 3'},
            "size belongs to a source of",
        ),
        ({"old": 'kind = "mixture"', "new": 'kind = "jsonl"'}, "belong together, for example"),
        ({"old": "size = 10", "new": "sise = 10"}, r"data\.mixture\.b\.sise: unknown key; did you mean 'size'\?"),
        (
            {"old": '[data.mixture.b]\nkind = "python"', "new": '[data.mixture.b]\nkind = "mixture"'},
            "b is a mixture in a",
        ),
        ({"more": CURRICULUM.format(4, "aa = 1")}, "curriculum of step 4: no source .* named 'aa'; did you mean 'a'"),
        ({"more": CURRICULUM.format(4, "a = 0.5")}, r"curriculum of step 4: the weights add up to 0\.5, not to 1"),
        ({"more": CURRICULUM.format(4, "a = 1") * 2}, r"its steps are \[4, 4\]; write them in ascending order"),
    ],
)
def test_mixture_that_cannot_be_meant_is_refused(mixed: Any, change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mixed(**change)


def test_saved_mixture_loads_unchanged(mixed: Any) -> None:
    config = mixed(more=CURRICULUM.format(4, "a = 1"))
    assert validate(config.model_dump(mode="json"), "saved") == config


def test_held_out_rows_have_no_weights(mixed: Any) -> None:
    held_out = MIXED.replace("[data", "[eval.data")
    with pytest.raises(ConfigError, match=r"eval\.data: mixture\.a\.weight has no effect"):
        mixed(more=held_out)


@pytest.mark.parametrize(
    ("settings", "rows"),
    # Ten rows of b, or 60 of a, at shares of 2 in 5 and 3 in 5.
    [(("data.stop=first", "run.epochs=1"), 26), (("data.stop=all", "run.epochs=1"), 100), (("data.stop=all",), 200)],
)
def test_epochs_of_a_mixture_end_as_the_setting_says(mixed: Any, settings: tuple[str, ...], rows: int) -> None:
    run = with_epochs(mixed(*settings)).run
    assert abs(run.rows - rows) <= 1
    assert run.steps == -(-run.rows // 8)


def test_mixture_that_never_ends_is_refused_with_the_remedy(mixed: Any) -> None:
    more = CURRICULUM.format(2, "b = 1")
    with pytest.raises(ConfigError, match=r"rows left, .*set run\.steps"):
        with_epochs(mixed("data.stop=all", more=more))


def test_sources_without_weights_are_one_data_set(mixed: Any) -> None:
    text = MIXED.replace("weight = 0.6", "").replace("weight = 0.4", "")
    assert with_epochs(mixed(old=MIXED, new=text)).run.rows == 2 * 70


def test_check_notes_what_a_run_takes_from_each_source(mixed: Any) -> None:
    notes = examine(with_epochs(mixed("data.stop=all", "run.epochs=1"))).notes
    shares = r"data: shares of \d+ rows: a 6\d% \(60 rows, 1 times\), b [34]\d% \(10 rows, [34](\.9)? times\)"
    assert any(re.fullmatch(shares, note) for note in notes), notes


def test_misspelled_field_is_noted(mixed: Any) -> None:
    notes = examine(mixed(old="size = 60", new='size = 60\nfields = { prompts = "x" }')).notes
    assert any("data.fields.prompts becomes 'prompts' of a row's metadata" in note for note in notes)
    assert any("did you mean 'prompt'?" in note for note in notes)
