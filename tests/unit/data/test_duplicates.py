"""Held-out rows that are nearly equal to training rows."""

from __future__ import annotations

from pathlib import Path

from relax_actors.config import load_config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.duplicates import compare, note_duplicates
from relax_actors.data.sources import open_source
from relax_actors.data.task import Medium, Task
from tests.support.data_files import jsonl_of
from tests.support.running import SUPPORT

STORY = "a farmer sells three sheep to his neighbour for ten coins each and buys a cow how many coins does he have left"
OTHER = "two trains leave their stations at noon and meet after three hours at which speed does the second one travel"
NEAR = STORY.replace("left", "now").upper() + "?"


def files(folder: Path, trained: list[str], held_out: list[str]) -> tuple[Path, Path]:
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, prompts in zip(paths, (trained, held_out), strict=True):
        jsonl_of(folder, *({"prompt": prompt} for prompt in prompts)).rename(path)
    return paths


def test_near_duplicates_are_found_whatever_their_case_and_signs(tmp_path: Path) -> None:
    trained, held_out = files(tmp_path, [OTHER, STORY, "short one"], [NEAR, "a new question", "Short one!"])
    found = compare(open_source("jsonl", path=trained), open_source("jsonl", path=held_out))
    assert (found.held_out, found.trained) == (3, 3)
    pairs = {(pair.held_out, pair.trained): pair.index for pair in found.pairs}
    assert pairs == {
        (f"{held_out} line 1", f"{trained} line 2"): 18 / 20,
        (f"{held_out} line 3", f"{trained} line 3"): 1.0,
    }


def test_malformed_rows_and_messages_are_compared_as_far_as_they_have_texts(tmp_path: Path) -> None:
    trained = jsonl_of(tmp_path, {"prompt": [{"role": "user", "content": STORY}]}, b"{", {"prompt": "x"})
    source = open_source("jsonl", path=trained)
    assert [pair.index for pair in compare(source, source).pairs] == [1.0, 1.0]


def test_comparison_ends_in_time_and_says_how_many_rows_it_has_seen(tmp_path: Path) -> None:
    trained, held_out = files(tmp_path, [f"{OTHER} {i}" for i in range(500)], [STORY])
    found = compare(open_source("jsonl", path=trained), open_source("jsonl", path=held_out), seconds=0)
    assert (found.held_out, found.trained, found.pairs) == (1, 1, [])


def test_the_same_question_about_other_media_is_another_row(tmp_path: Path) -> None:
    def asked(*media: Medium) -> list[Task]:
        return [Task("<image> which digit is this", metadata={"id": i}, media=(one,)) for i, one in enumerate(media)]

    (tmp_path / "copy.png").write_bytes(b"2")
    one, two, three = (Medium("image", data=content) for content in (b"1", b"2", b"3"))
    copy = Medium("image", path="copy.png", folder=tmp_path)
    pairs = compare(asked(one, two), asked(copy, three)).pairs
    assert [(pair.held_out, pair.trained) for pair in pairs] == [("row 1", "row 2")]


def test_rows_with_other_metadata_are_near_and_the_note_says_what_an_environment_reads(tmp_path: Path) -> None:
    trained, held_out = jsonl_of(tmp_path, {"prompt": STORY, "id": 1}), tmp_path / "test.jsonl"
    held_out.write_bytes(trained.read_bytes().replace(b"1", b"2"))
    settings = ["data.kind=jsonl", f"data.path={trained}", "eval.data.kind=jsonl", f"eval.data.path={held_out}"]
    played = ["environment.name=tiny_pick.Pick", "reward.function=environment"]
    for more, words in ((settings, False), ([*settings, *played], True)):
        config = load_config(SUPPORT / "tiny.toml", [*more, "eval.rows=1"])
        assert config.eval is not None
        (note,) = note_duplicates(CheckedRun(config=config, here=()), config.eval.data, "eval.data")
        assert "1 of 1 rows" in note
        assert ("the environment reads" in note) == words


def test_note_names_the_nearest_rows(tmp_path: Path) -> None:
    trained, held_out = files(tmp_path, [OTHER, STORY], [NEAR, "new"])
    settings = ["data.kind=jsonl", f"data.path={trained}", "eval.data.kind=jsonl", f"eval.data.path={held_out}"]
    config = load_config(SUPPORT / "tiny.toml", [*settings, "eval.rows=2"])
    assert config.eval is not None
    note = (
        "eval.data: 1 of 2 rows are nearly equal to one of 2 compared rows of the training data, so that held-out "
        f"scores are too good; the nearest: {held_out} line 1 and {trained} line 2, which share 90% of their sequences "
        "of 5 words"
    )
    assert list(note_duplicates(CheckedRun(config=config, here=()), config.eval.data, "eval.data")) == [note]
