"""Convert a public data set of questions into JSON Lines that `data.kind = "jsonl"` reads.

    python examples/omni/convert.py geometry3k FOLDER/train --output FOLDER/train.jsonl
    python examples/omni/convert.py vqa FOLDER --questions q.json --annotations a.json --output FOLDER/train.jsonl
    python examples/omni/convert.py mmau FOLDER --questions mmau-test-mini.json --output FOLDER/test.jsonl
    python examples/omni/convert.py nextqa FOLDER --questions train.csv --output FOLDER/train.jsonl
    python examples/omni/convert.py spoken FOLDER --questions manifest.json --output FOLDER/train.jsonl
    python examples/omni/convert.py deepeyes part.parquet --output deepeyes.jsonl
    python examples/omni/convert.py dapo dapo-math-17k.parquet --output math.jsonl

geometry3k  a folder per problem with data.json (problem_text, choices, answer) and img_diagram.png
vqa         questions ({questions: [{image_id, question, question_id}]}), annotations ({annotations: [{question_id,
            multiple_choice_answer}]}) and pictures whose names end in the image_id, with 12 digits or without padding
mmau        a list of {audio_id, question, choices, answer}, where audio_id is a path and answer the text of a choice
nextqa      CSV with video, question, a0 to a4, answer (number of a choice) and qid; videos are VIDEO.mp4 in any folder
spoken      a line of JSON per recorded question: {audio_filepath, answer}, other fields are ignored
deepeyes    Parquet with prompt (messages), images (bytes), reward_model.ground_truth and extra_info; questions whose
            answer is no letter need a judge and are skipped
dapo        Parquet with prompt (messages), reward_model.ground_truth and extra_info.index, each problem many times

Nothing is downloaded. Pictures inside a Parquet file are written to a folder beside the output; other media are neither
copied nor decoded. Rows name their media relative to the output file, which should lie above the media: files outside
its folder are refused unless the configuration allows them. Rows without a file, a question or a known answer, and
repeated ones, are skipped and counted. Questions with choices go with the reward `multiple_choice`, problems of
mathematics with `math_verify`, others with `exact_match`. Parquet needs pyarrow.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_LETTERS = string.ascii_uppercase


class SkippedRow(Exception):  # noqa: N818 it is no error
    """A row that cannot be converted, with the reason."""


def geometry3k(folder: Path) -> Iterator[Row | SkippedRow]:
    """Geometry problems: a picture, four choices, the letter of the right one."""
    for path in sorted(folder.glob("*/data.json"), key=lambda path: (len(path.parent.name), path.parent.name)):
        try:
            body = fields_of(json.loads(path.read_text()), str(path), "problem_text", "choices", "answer")
            letter = str(body["answer"]).strip().upper()
            question = asked("<image>", body["problem_text"], body["choices"], letter, str(path))
            yield question | {"images": [existing(path.parent / "img_diagram.png")], "id": path.parent.name}
        except (SkippedRow, ValueError) as error:
            yield SkippedRow(str(error))


def vqa(folder: Path, questions: Path, annotations: Path) -> Iterator[Row | SkippedRow]:
    """Open questions about photos; the answer is the one that most people gave."""
    pictures = {int(found[1]): path for path in sorted(folder.rglob("*")) if (found := _PICTURE.search(path.name))}
    answers = {each["question_id"]: each for each in json.loads(annotations.read_text())["annotations"]}
    for number, each in enumerate(json.loads(questions.read_text())["questions"]):
        where = f"{questions} question {number}"
        try:
            body = fields_of(each, where, "image_id", "question", "question_id")
            answer = answers.get(body["question_id"], {}).get("multiple_choice_answer")
            picture = pictures.get(int(body["image_id"]))
            if answer is None or picture is None:
                missing = "no annotation" if answer is None else f"no picture of image_id {body['image_id']}"
                yield SkippedRow(f"{where}: {missing}")
                continue
            question = {"prompt": f"<image>{body['question']}", "answer": str(answer)}
            yield question | {"images": [picture], "id": str(body["question_id"])}
        except SkippedRow as error:
            yield error


_PICTURE = re.compile(r"(?:^|_)0*(\d{1,12})\.(?:jpe?g|png)$")


def mmau(folder: Path, questions: Path) -> Iterator[Row | SkippedRow]:
    """Questions about sounds with choices."""
    for number, each in enumerate(json.loads(questions.read_text())):
        where = f"{questions} question {number}"
        try:
            body = fields_of(each, where, "audio_id", "question", "choices", "answer")
            choices = [str(choice).strip() for choice in body["choices"]]
            answer = str(body["answer"]).strip()
            letter = _LETTERS[choices.index(answer)] if answer in choices else "none"
            question = asked("<audio>", body["question"], choices, letter, where)
            yield question | {"audios": [existing(folder / body["audio_id"])], "id": str(body.get("id", number))}
        except SkippedRow as error:
            yield error


def nextqa(folder: Path, questions: Path) -> Iterator[Row | SkippedRow]:
    """Questions about videos with five choices."""
    videos = {path.stem: path for path in sorted(folder.rglob("*.mp4"))}
    with questions.open(newline="") as file:
        for number, each in enumerate(csv.DictReader(file)):
            where = f"{questions} question {number}"
            try:
                body = fields_of(each, where, "video", "question", "answer", *(f"a{n}" for n in range(5)))
                choices = [body[f"a{n}"].strip() for n in range(5)]
                letter = dict(zip("01234", _LETTERS, strict=False)).get(body["answer"], "none")
                question = asked("<video>", body["question"].strip(), choices, letter, where)
                video = videos.get(body["video"]) or existing(folder / f"{body['video']}.mp4")
                yield question | {"videos": [video], "id": f"{body['video']}_{body.get('qid', number)}"}
            except SkippedRow as error:
                yield error


def spoken(folder: Path, questions: Path) -> Iterator[Row | SkippedRow]:
    """Questions that are spoken; the model hears them and reads no text of them."""
    with questions.open() as file:
        for number, line in enumerate(file):
            where = f"{questions} line {number + 1}"
            try:
                body = fields_of(json.loads(line), where, "audio_filepath", "answer")
                audio = existing(folder / body["audio_filepath"])
                prompt = "<audio>Answer the question that you hear in a few words."
                yield {"prompt": prompt, "answer": str(body["answer"]), "audios": [audio], "id": str(number)}
            except json.JSONDecodeError as error:
                yield SkippedRow(f"{where}: {error}")
            except SkippedRow as error:
                yield error


def deepeyes(source: Path, output: Path) -> Iterator[Row | SkippedRow]:
    """Questions about details of large pictures, which are stored in the file."""
    folder = output.with_name(f"{output.stem}-images")
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(rows_of_parquet(source)):
        where = f"{source} row {number}"
        try:
            body = fields_of(each, where, "prompt", "images", "reward_model")
            letter = letter_of(truth_of(body, where), where)
            text = question_of(body["prompt"], where)
            images = []
            for n, image in enumerate(body["images"]):
                data = fields_of(image, where, "bytes")["bytes"]
                ending = next((end for start, end in _ENDINGS.items() if data.startswith(start)), "bin")
                images.append(folder / f"{number:07}-{n}.{ending}")
                images[-1].write_bytes(data)
            marks = "" if "<image>" in text else "<image>" * len(images)
            yield {"prompt": marks + text, "answer": letter, "images": images, "id": str(number)}
        except SkippedRow as error:
            yield error


_ENDINGS = {b"\x89PNG": "png", b"\xff\xd8": "jpg", b"RIFF": "webp"}
"""Names of picture files by their first bytes."""


def dapo(source: Path) -> Iterator[Row | SkippedRow]:
    """Problems of mathematics whose answer is a number, each once and without the instructions around it."""
    seen: set[str] = set()
    for number, each in enumerate(rows_of_parquet(source)):
        where = f"{source} row {number}"
        try:
            body = fields_of(each, where, "prompt", "reward_model")
            problem = _INSTRUCTIONS.sub("", question_of(body["prompt"], where)).strip()
            name = str((body.get("extra_info") or {}).get("index", problem))
            if name in seen:
                yield SkippedRow(f"{where}: a repeated problem")
                continue
            seen.add(name)
            yield {"prompt": problem, "answer": str(truth_of(body, where)), "id": name}
        except SkippedRow as error:
            yield error


_INSTRUCTIONS = re.compile(r"\ASolve the following math problem.*?\n\n|\n\nRemember to put your answer.*\Z", re.DOTALL)
"""What the file puts before and after each problem; the template of a run says it in its own words."""


def rows_of_parquet(source: Path) -> Iterator[Row]:
    """Read the rows of a Parquet file, some at a time."""
    from pyarrow import parquet  # noqa: PLC0415 only for layouts of Parquet

    for batch in parquet.ParquetFile(source).iter_batches(64):
        yield from batch.to_pylist()


def question_of(messages: list[dict[str, Any]], where: str) -> str:
    """Return the text of the only message of the user."""
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    if len(texts) != 1:
        msg = f"{where}: has {len(texts)} messages of the user, needs one"
        raise SkippedRow(msg)
    return str(texts[0])


def truth_of(body: dict[str, Any], where: str) -> object:
    """Return the reference answer of a row of Parquet."""
    return fields_of(body["reward_model"], where, "ground_truth")["ground_truth"]


def letter_of(answer: object, where: str) -> str:
    """Return an answer that is a letter, as a capital one."""
    letter = str(answer).strip().rstrip(".").upper()
    if letter not in _LETTERS or len(letter) != 1:
        msg = f"{where}: the answer {str(answer)[:40]!r} is no letter of a choice"
        raise SkippedRow(msg)
    return letter


def fields_of(body: object, where: str, *names: str) -> dict[str, Any]:
    """Return an object that has all these fields."""
    if isinstance(body, dict) and all(body.get(name) not in (None, "", []) for name in names):
        return body
    msg = f"{where}: needs {', '.join(names)}"
    raise SkippedRow(msg)


def asked(placeholder: str, question: str, choices: list[Any], letter: str, where: str) -> Row:
    """Return a question with lettered choices."""
    if letter not in _LETTERS[: len(choices)] or len(letter) != 1:
        msg = f"{where}: the answer is none of the choices"
        raise SkippedRow(msg)
    lines = [question if placeholder in question else placeholder + question]
    lines += [f"{each}. {choice}" for each, choice in zip(_LETTERS, choices, strict=False)]
    return {"prompt": "\n".join(lines), "choices": [str(choice) for choice in choices], "answer": letter}


def existing(path: Path) -> Path:
    """Return the path of a file that exists."""
    if not path.is_file():
        msg = f"{path} does not exist"
        raise SkippedRow(msg)
    return path


def write(rows: Iterator[Row | SkippedRow], output: Path) -> tuple[int, int, str]:
    """Write the rows; return their number, that of the skipped ones, and the first reason."""
    count, skipped, first = 0, 0, ""
    base = output.resolve().parent
    temporary = output.with_name(f".{output.name}.tmp")
    with temporary.open("w") as file:
        for row in rows:
            if isinstance(row, SkippedRow):
                first = first or f", the first: {row}"
                skipped += 1
                continue
            media = {
                kind: [os.path.relpath(path.resolve(), base) for path in row[kind]]
                for kind in ("images", "videos", "audios")
                if kind in row
            }
            file.write(json.dumps(row | media, ensure_ascii=False) + "\n")
            count += 1
    temporary.rename(output)
    return count, skipped, first


LAYOUTS: dict[str, tuple[Callable[..., Iterator[Row | SkippedRow]], tuple[str, ...]]] = {
    "geometry3k": (geometry3k, ()),
    "vqa": (vqa, ("questions", "annotations")),
    "mmau": (mmau, ("questions",)),
    "nextqa": (nextqa, ("questions",)),
    "spoken": (spoken, ("questions",)),
    "deepeyes": (deepeyes, ("output",)),
    "dapo": (dapo, ()),
}
"""Converter of each layout, and the options that it reads."""


def main() -> None:
    """Convert a data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("source", type=Path, help="folder with the media, or a Parquet file")
    parser.add_argument("--questions", type=Path, help="file with the questions (vqa, mmau, nextqa, spoken)")
    parser.add_argument("--annotations", type=Path, help="file with the answers (vqa)")
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    options = parser.parse_args()
    convert, needed = LAYOUTS[options.layout]
    for name in needed:
        if getattr(options, name) is None:
            parser.error(f"{options.layout} needs --{name}")
    try:
        rows = convert(options.source, *(getattr(options, name) for name in needed))
        count, skipped, first = write(rows, options.output)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"convert.py: this is not the layout {options.layout}: {type(error).__name__}: {error}")
    except ImportError as error:
        sys.exit(f"convert.py: {error}; pip install pyarrow")
    print(f"{options.output}: {count} rows, {skipped} skipped{first}")
    sys.exit(0 if count else 1)


if __name__ == "__main__":
    main()
