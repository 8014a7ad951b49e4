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

from relax_actors.envs.media_bytes import png_of
from tests.support.messages import assert_says
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
    assert_says(done.stderr, "make_data.py", "espeak-ng", "apt install espeak-ng")
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
    assert_says(done.stdout, f"{tmp_path}/train.jsonl", "1 rows, 3 skipped", missing)
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
    assert_says(done.stdout, f"{tmp_path}/train.jsonl", "1 rows, 2 skipped", where, "image_id 26")
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


def test_questions_about_videos_become_rows_with_lettered_choices(tmp_path: Path) -> None:
    (tmp_path / "NExTVideo" / "1106").mkdir(parents=True)
    (tmp_path / "NExTVideo" / "1106" / "4010069381.mp4").touch()
    head = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4"
    choices = "crawl,"
    question = "369,640,480,how do the two men play the instrument,{},6,CH,roll the handle,tap,strum,hit,pat"
    listed = [
        f"4010069381,{question.format(2)}",
        f"1,{question.format(2)}",
        f"4010069381,{question.format(5)}",
        f"4010069381,{question.format(26)}",
        choices,
    ]
    (tmp_path / "val.csv").write_text("\n".join([head, *listed]) + "\n")
    done = script(
        "convert.py", "nextqa", tmp_path, "--questions", tmp_path / "val.csv", "--output", tmp_path / "v.jsonl"
    )
    assert_says(done.stdout, f"{tmp_path}/v.jsonl", "1 rows, 4 skipped", f"{tmp_path}/1.mp4")
    assert rows_of(tmp_path / "v.jsonl") == [
        {
            "prompt": "<video>how do the two men play the instrument\n"
            "A. roll the handle\nB. tap\nC. strum\nD. hit\nE. pat",
            "choices": ["roll the handle", "tap", "strum", "hit", "pat"],
            "answer": "C",
            "videos": ["NExTVideo/1106/4010069381.mp4"],
            "id": "4010069381_6",
        }
    ]


def test_spoken_questions_become_rows(tmp_path: Path) -> None:
    (tmp_path / "wav").mkdir()
    (tmp_path / "wav" / "0.wav").touch()
    lines = [
        {"audio_filepath": "wav/0.wav", "duration": 2.1, "text": "who wrote Faust", "answer": "Goethe"},
        {"text": ""},
    ]
    (tmp_path / "m.json").write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    done = script(
        "convert.py", "spoken", tmp_path, "--questions", tmp_path / "m.json", "--output", tmp_path / "s.jsonl"
    )
    assert "1 rows, 2 skipped, the first" in done.stdout
    (row,) = rows_of(tmp_path / "s.jsonl")
    assert (row["answer"], row["audios"], row["prompt"][:7]) == ("Goethe", ["wav/0.wav"], "<audio>")
    assert "Faust" not in row["prompt"]


def test_problems_of_parquet_become_rows_once_and_without_instructions(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind $x$.\n\nIt is positive.\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "dapo.parquet")
    done = script("convert.py", "dapo", tmp_path / "dapo.parquet", "--output", tmp_path / "math.jsonl")
    assert_says(
        done.stdout, f"{tmp_path}/math.jsonl", "1 rows, 1 skipped", f"{tmp_path}/dapo.parquet row 1", "repeated"
    )
    assert rows_of(tmp_path / "math.jsonl") == [
        {"prompt": "Find $x$.\n\nIt is positive.", "answer": "34", "id": "9a9b"}
    ]


def test_pictures_of_parquet_are_written_beside_the_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    picture = png_of(np.zeros((4, 4, 3), np.uint8))
    said = [
        {"role": "system", "content": "Call tools."},
        {"role": "user", "content": "<image>\nWhich?\nA. red\nB. blue"},
    ]
    listed = [
        {"prompt": said, "images": [{"bytes": picture, "path": None}], "reward_model": {"ground_truth": answer}}
        for answer in ("B", "the red one", "A.")
    ]
    listed.append(listed[0] | {"images": [{"bytes": None, "path": "elsewhere.png"}]})
    parquet.write_table(pyarrow.Table.from_pylist(listed), tmp_path / "vstar.parquet")
    done = script("convert.py", "deepeyes", tmp_path / "vstar.parquet", "--output", tmp_path / "d.jsonl")
    assert "2 rows, 2 skipped, the first" in done.stdout
    assert "'the red one' is no letter" in done.stdout
    rows = rows_of(tmp_path / "d.jsonl")
    assert [(row["answer"], row["images"]) for row in rows] == [
        ("B", ["d-images/0000000-0.png"]),
        ("A", ["d-images/0000002-0.png"]),
    ]
    assert rows[0]["prompt"] == "<image>\nWhich?\nA. red\nB. blue"
    assert (tmp_path / rows[0]["images"][0]).read_bytes() == picture


def test_other_layout_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"rows": []}')
    files = ("--questions", tmp_path / "q.json", "--annotations", tmp_path / "q.json")
    done = script("convert.py", "vqa", tmp_path, *files, "--output", tmp_path / "train.jsonl")
    assert (done.returncode, done.stdout) == (1, "")
    assert_says(done.stderr, "convert.py", "layout vqa", "'annotations'")
    assert not (tmp_path / "train.jsonl").exists()
    assert "convert.py vqa FOLDER --questions" in script("convert.py", "--help").stdout
