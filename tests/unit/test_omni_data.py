"""The data of examples/omni: real media, the same for the same seed, held-out parts apart; and its converters."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.omni_data import EXAMPLES, needs_speech, omni_module


def script(name: str, *arguments: object, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path} if path is not None else None
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_pictures_and_clips_are_real_files_and_equal_for_the_same_seed(tmp_path: Path) -> None:
    cv2, av, make = pytest.importorskip("cv2"), pytest.importorskip("av"), omni_module("make_data").make
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        assert [make(task, tmp_path / name / task, rows=6, held_out=3, seed=seed) for task in ("image", "video")] == [
            1,
            1,
        ]
    assert content_of(tmp_path / "one") == content_of(tmp_path / "same")
    assert content_of(tmp_path / "one") != content_of(tmp_path / "other")
    folder = tmp_path / "one" / "image"
    rows = rows_of(folder / "train.jsonl")
    assert [len(rows), len(rows_of(folder / "test.jsonl"))] == [6, 3]
    assert rows[0] == {"prompt": "<image>?", "images": ["train/00000.png"], "answer": rows[0]["answer"]}
    assert cv2.imread(str(folder / "train" / "00000.png")).shape == (16, 32, 3)
    clip = rows_of(tmp_path / "one" / "video" / "test.jsonl")[2]
    with av.open(tmp_path / "one" / "video" / clip["videos"][0]) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        frames = [frame.to_ndarray(format="gray8") for frame in container.decode(video=0)]
    assert [frame.shape for frame in frames] == [(32, 32)] * 8
    blank = rows_of(tmp_path / "one" / "video" / "blank.jsonl")[2]
    assert (blank["answer"], blank["videos"]) == (clip["answer"], ["test/blank-8x32x32.mp4"])
    with av.open(tmp_path / "one" / "video" / blank["videos"][0]) as container:
        assert max(frame.to_ndarray(format="gray8").max() for frame in container.decode(video=0)) == 0
    assert not make("image", folder, rows=9, held_out=9, seed=9)
    assert rows_of(folder / "train.jsonl") == rows


def test_no_handwritten_digit_is_in_both_parts() -> None:
    handwritten = omni_module("handwritten").handwritten
    train, test = ({each.pixels.tobytes() for each in handwritten(test=held_out)} for held_out in (False, True))
    assert len(train) > 1400
    assert len(test) > 350
    assert not train & test


def test_speech_has_voices_apart_and_no_silence_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_speech()
    speech = omni_module("speech")
    assert not set(speech.VOICES) & set(speech.TEST_VOICES)
    monkeypatch.setattr(speech, "PITCHES", (50,))
    monkeypatch.setattr(speech, "SPEEDS", (175,))
    words = speech.spoken(test=True)
    assert [word.value for word in words] == [*range(10)] * len(speech.TEST_VOICES)
    assert [word.wav for word in words] == [word.wav for word in speech.spoken(test=True)]
    for word in words:
        with wave.open(io.BytesIO(word.wav)) as reader:
            assert (reader.getnchannels(), reader.getframerate()) == (1, 22050)
            samples = np.frombuffer(reader.readframes(reader.getnframes()), np.int16).astype(int)
        assert 0.1 < len(samples) / 22050 < 1.5
        assert min(abs(samples[0]), abs(samples[-1])) > 300


def test_missing_synthesiser_is_named_with_its_package(tmp_path: Path) -> None:
    done = script("make_data.py", "--tasks", "omni", "--folder", tmp_path, path=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "make_data.py: omni: the spoken digits need espeak-ng, which is not installed; "
        "apt install espeak-ng (Debian, Ubuntu)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_geometry_problems_become_rows_with_lettered_choices(tmp_path: Path) -> None:
    problem = {"problem_text": "Find x.", "choices": ["2.0", "4.0"], "answer": "B", "precise_value": [2, 4]}
    for number, body in ((2, problem), (10, problem | {"answer": "C"}), (11, problem | {"choices": []}), (3, problem)):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        (tmp_path / "train" / str(number) / "data.json").write_text(json.dumps(body))
    (tmp_path / "train" / "2" / "img_diagram.png").touch()
    (tmp_path / "train" / "10" / "img_diagram.png").touch()
    done = script("convert.py", "geometry3k", tmp_path / "train", "--output", tmp_path / "train.jsonl")
    missing = tmp_path / "train" / "3" / "img_diagram.png"
    assert done.stdout == f"{tmp_path}/train.jsonl: 1 rows, 3 skipped, the first: {missing} does not exist\n"
    assert rows_of(tmp_path / "train.jsonl") == [
        {
            "prompt": "<image>Find x.\nA. 2.0\nB. 4.0",
            "choices": ["2.0", "4.0"],
            "answer": "B",
            "images": ["train/2/img_diagram.png"],
            "id": "2",
        }
    ]


def test_open_questions_about_photos_become_rows(tmp_path: Path) -> None:
    (tmp_path / "train2014").mkdir()
    (tmp_path / "train2014" / "COCO_train2014_000000000025.jpg").touch()
    questions = [{"image_id": image, "question": "What is it?", "question_id": image * 10} for image in (25, 26, 27)]
    (tmp_path / "q.json").write_text(json.dumps({"questions": questions}))
    answers = [{"question_id": each, "multiple_choice_answer": "giraffe"} for each in (250, 260)]
    (tmp_path / "a.json").write_text(json.dumps({"annotations": answers}))
    files = ("--questions", tmp_path / "q.json", "--annotations", tmp_path / "a.json")
    done = script("convert.py", "vqa", tmp_path, *files, "--output", tmp_path / "train.jsonl")
    where = f"{tmp_path}/q.json question 1"
    assert done.stdout == f"{tmp_path}/train.jsonl: 1 rows, 2 skipped, the first: {where}: no picture of image_id 26\n"
    picture = "train2014/COCO_train2014_000000000025.jpg"
    row = {"prompt": "<image>What is it?", "answer": "giraffe", "images": [picture], "id": "250"}
    assert rows_of(tmp_path / "train.jsonl") == [row]


def test_questions_about_sounds_become_rows(tmp_path: Path) -> None:
    (tmp_path / "test-mini-audios").mkdir()
    (tmp_path / "test-mini-audios" / "a.wav").touch()
    question = {"audio_id": "./test-mini-audios/a.wav", "question": "Who speaks?", "choices": ["a man", "a child "]}
    listed = [{"id": "x1", "answer": "a child"}, {"answer": "a dog"}, {}]
    (tmp_path / "q.json").write_text(json.dumps([question | each for each in listed]))
    options = ("--questions", tmp_path / "q.json", "--output", tmp_path / "out.jsonl")
    done = script("convert.py", "mmau", tmp_path, *options)
    where = f"{tmp_path}/q.json question 1"
    said = f"{tmp_path}/out.jsonl: 1 rows, 2 skipped, the first: {where}: the answer is none of the choices\n"
    assert (done.returncode, done.stdout) == (0, said)
    assert rows_of(tmp_path / "out.jsonl") == [
        {
            "prompt": "<audio>Who speaks?\nA. a man\nB. a child",
            "choices": ["a man", "a child"],
            "answer": "B",
            "audios": ["test-mini-audios/a.wav"],
            "id": "x1",
        }
    ]


def test_other_layout_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"rows": []}')
    files = ("--questions", tmp_path / "q.json", "--annotations", tmp_path / "q.json")
    done = script("convert.py", "vqa", tmp_path, *files, "--output", tmp_path / "train.jsonl")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "convert.py: this is not the layout vqa: KeyError: 'annotations'\n"
    assert not (tmp_path / "train.jsonl").exists()
    assert "convert.py vqa FOLDER --questions" in script("convert.py", "--help").stdout
