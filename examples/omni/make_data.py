"""Make the data of the four tasks: real PNG, WAV and MP4 files, and a JSON Lines file that names them.

    python examples/omni/make_data.py [--tasks image sound] [--folder FOLDER] [--rows 6000] [--held-out 512] [--seed 1]

image   two handwritten digits side by side: read them
sound   a spoken digit: which one is it?
video   handwritten digits shown one after the other: read them
omni    a handwritten and a spoken digit: both, the smaller one first; neither medium alone suffices

The folder of a task appears complete or not at all; it is made once, and remade only after it is deleted. The same seed
gives the same rows. Held-out rows use pictures and voices that no training row uses. Beside them lie the same rows with
blank media (blank.jsonl), of omni also with one of the two media blank. Needs the extra `media`, and for sound and omni
the Debian package `espeak-ng`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clips
import numpy as np
from blanks import BLANKS
from handwritten import Digit, handwritten, moved, side_by_side
from speech import spoken

from relax_actors import ConfigError

Row = dict[str, Any]
Save = Callable[[str, bytes], str]
"""Write a media file unless it exists; returns its path as the rows name it."""


def pair(digits: list[Digit], source: random.Random, *, test: bool) -> list[Digit]:
    """Choose two digits; those of training rows are moved a little."""
    two = source.choices(digits, k=2)
    return two if test else [moved(digit, source) for digit in two]


def image_rows(source: random.Random, save: Save, *, test: bool) -> Iterator[Row]:
    """Two handwritten digits side by side."""
    digits = handwritten(test=test)
    for number in range(sys.maxsize):
        two = pair(digits, source, test=test)
        path = save(f"{number:05d}.png", png(side_by_side(two)))
        yield {"prompt": "<image>?", "images": [path], "answer": "".join(str(digit.value) for digit in two)}


def sound_rows(source: random.Random, save: Save, *, test: bool) -> Iterator[Row]:
    """A spoken digit."""
    words = spoken(test=test)
    while True:
        word = source.choice(words)
        yield {"prompt": "<audio>?", "audios": [save(f"{word.name}.wav", word.wav)], "answer": str(word.value)}


def video_rows(source: random.Random, save: Save, *, test: bool) -> Iterator[Row]:
    """Two handwritten digits, one after the other."""
    digits = handwritten(test=test)
    for number in range(sys.maxsize):
        two = pair(digits, source, test=test)
        path = save(f"{number:05d}.mp4", clips.mp4(clips.frames_of(two)))
        yield {"prompt": "<video>?", "videos": [path], "answer": "".join(str(digit.value) for digit in two)}


def omni_rows(source: random.Random, save: Save, *, test: bool) -> Iterator[Row]:
    """A handwritten and a spoken digit."""
    words, digits = spoken(test=test), list(enumerate(handwritten(test=test)))
    while True:
        (number, digit), word = source.choice(digits), source.choice(words)
        yield {
            "prompt": "<image><audio>?",
            "images": [save(f"{number:05d}.png", png(digit.pixels))],
            "audios": [save(f"{word.name}.wav", word.wav)],
            "answer": "".join(sorted(f"{digit.value}{word.value}")),
            "seen": digit.value,
            "heard": word.value,
        }


TASKS = {"image": image_rows, "sound": sound_rows, "video": video_rows, "omni": omni_rows}


def png(pixels: np.ndarray) -> bytes:
    """Encode a grey picture `[height, width] uint8`."""
    import cv2  # noqa: PLC0415 with the extra `media`

    return bytes(cv2.imencode(".png", pixels)[1])


def write_task(task: str, folder: Path, *, rows: int, held_out: int, seed: int) -> None:
    """Write `train.jsonl`, `test.jsonl`, `blank.jsonl` and their media."""
    for name, size in (("train", rows), ("test", held_out)):
        (folder / name).mkdir()

        def save(file: str, content: bytes, name: str = name) -> str:
            path = folder / name / file
            if not path.exists():
                path.write_bytes(content)
            return f"{name}/{file}"

        made = TASKS[task](random.Random(f"{task} {name} {seed}"), save, test=name == "test")  # noqa: S311 not a secret
        chosen = [row for row, _ in zip(made, range(size), strict=False)]
        write_rows(folder / f"{name}.jsonl", chosen)
    lists = [name for name in BLANKS if name in chosen[0]]
    for names in {tuple(lists), *((name,) for name in lists)}:
        suffix = "" if len(names) == len(lists) else f"-{names[0]}"
        write_rows(folder / f"blank{suffix}.jsonl", [blanked(row, names, folder, save) for row in chosen])


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def blanked(row: Row, names: tuple[str, ...], folder: Path, save: Save) -> Row:
    """Return a row with the media of these lists blank."""
    return row | {name: [save(*BLANKS[name]((folder / path).read_bytes())) for path in row[name]] for name in names}


def make(task: str, target: Path, *, rows: int, held_out: int, seed: int) -> bool:
    """Make the folder of a task; return False if it exists."""
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        write_task(task, temporary, rows=rows, held_out=held_out, seed=seed)
        temporary.chmod(0o755)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def main() -> None:
    """Make the data of the tasks unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--rows", type=int, default=6000, help="training rows of a task")
    parser.add_argument("--held-out", type=int, default=512, help="held-out rows of a task")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for task in options.tasks:
        target = options.folder / task
        try:
            made = make(task, target, rows=options.rows, held_out=options.held_out, seed=options.seed)
        except ConfigError as error:
            sys.exit(f"make_data.py: {task}: {error}")
        print(f"{target} {'written' if made else 'exists'}")


if __name__ == "__main__":
    main()
