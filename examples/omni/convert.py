"""Convert a public data set of questions about pictures or sounds into JSON Lines that `data.kind = "jsonl"` reads.

    python examples/omni/convert.py geometry3k FOLDER/train --output FOLDER/train.jsonl
    python examples/omni/convert.py vqa FOLDER --questions q.json --annotations a.json --output FOLDER/train.jsonl
    python examples/omni/convert.py mmau FOLDER --questions mmau-test-mini.json --output FOLDER/test.jsonl

geometry3k  a folder per problem with data.json (problem_text, choices, answer) and img_diagram.png
vqa         questions ({questions: [{image_id, question, question_id}]}), annotations ({annotations: [{question_id,
            multiple_choice_answer}]}) and pictures whose names end in the image_id, with 12 digits or without padding
mmau        a list of {audio_id, question, choices, answer}, where audio_id is a path and answer the text of a choice

Nothing is downloaded, copied or decoded. Rows name their media relative to the output file, which should lie above the
media: files outside its folder are refused unless the configuration allows them. Rows without a file, a question or a
known answer are skipped and counted. Questions with choices go with the reward `multiple_choice`, others with
`exact_match`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import string
import sys
from collections.abc import Iterator
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


def write(rows: Iterator[Row | SkippedRow], output: Path) -> tuple[int, list[str]]:
    """Write the rows; return their number, and the reasons of the skipped ones."""
    count, skipped = 0, []
    base = output.resolve().parent
    temporary = output.with_name(f".{output.name}.tmp")
    with temporary.open("w") as file:
        for row in rows:
            if isinstance(row, SkippedRow):
                skipped.append(str(row))
                continue
            media = {
                kind: [os.path.relpath(path.resolve(), base) for path in row[kind]]
                for kind in ("images", "audios")
                if kind in row
            }
            file.write(json.dumps(row | media, ensure_ascii=False) + "\n")
            count += 1
    temporary.rename(output)
    return count, skipped


def main() -> None:
    """Convert a data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=("geometry3k", "vqa", "mmau"))
    parser.add_argument("folder", type=Path, help="folder with the media")
    parser.add_argument("--questions", type=Path, help="file with the questions (vqa, mmau)")
    parser.add_argument("--annotations", type=Path, help="file with the answers (vqa)")
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    options = parser.parse_args()
    needed = {"geometry3k": (), "vqa": ("questions", "annotations"), "mmau": ("questions",)}[options.layout]
    for name in needed:
        if getattr(options, name) is None:
            parser.error(f"{options.layout} needs --{name}")
    convert = {"geometry3k": geometry3k, "vqa": vqa, "mmau": mmau}[options.layout]
    try:
        count, skipped = write(convert(options.folder, *(getattr(options, name) for name in needed)), options.output)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"convert.py: this is not the layout {options.layout}: {type(error).__name__}: {error}")
    first = f", the first: {skipped[0]}" if skipped else ""
    print(f"{options.output}: {count} rows, {len(skipped)} skipped{first}")
    sys.exit(0 if count else 1)


if __name__ == "__main__":
    main()
