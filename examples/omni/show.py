"""Show what a model with media answers: a page with pictures, spectrograms, questions, answers and rewards.

    python examples/omni/show.py RUN [--rows 24] [--output FILE.html]

Reads the held-out rows of the last evaluation of a run with media, live or over, and writes `samples.html` in the
folder of the run: one file, which opens without a server. It says what the task is, and shows each prompt as the model
reads it: text, and media in their places. Pictures and spectrograms are the features that the model got, sounds are the
files. Texts of the data and of the model are escaped.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from drawing import frames_of, spectrogram, strip

from relax_actors import CodecError, Connected, PreparedPrompt, Prompt, RelaxError, Reward, Trajectory, connected
from relax_actors.media import FAMILIES, Family, family_of
from relax_actors.printable import printable

COLUMNS: dict[str, type[Any]] = {
    "prompt": Prompt,
    "media": PreparedPrompt,
    "trajectory": Trajectory,
    "reward": Reward,
}
PLAYED = {".wav": "audio/wav", ".mp3": "audio/mpeg", ".ogg": "audio/ogg", ".flac": "audio/flac", ".mp4": "video/mp4"}
MAX_PLAYED_BYTES = 1 << 20
SPAN = re.compile(
    "(?:{})?(?:{}|<(?:image|video|audio)>)(?:{})?".format(
        *(
            "|".join(
                re.escape(family.tokens[role]) for family in FAMILIES.values() for role in roles & family.tokens.keys()
            )
            for roles in ({"vision_start", "audio_start"}, {"image", "video", "audio"}, {"vision_end", "audio_end"})
        )
    )
)
"""Where a medium stands in the text of a prompt."""
STYLE = (
    "body{font:15px sans-serif;max-width:72em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.5em;border-bottom:1px solid #ccc}"
    "img{image-rendering:pixelated;min-height:96px;max-width:32em;display:block}"
    "audio{height:2em;width:14em}pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".good{color:#08660a}.bad{color:#a01010}.of{color:#555;font-size:85%;overflow-wrap:anywhere}"
)


@dataclass(frozen=True)
class Shown:
    """A held-out row: its prompt and its drawn media as HTML, and its other texts."""

    prompt: str
    expected: str
    answer: str
    reward: float


def read_rows(at: Connected, count: int) -> tuple[int, list[Shown]]:
    """Read the last evaluated version and its first rows."""
    subjects = at.table.subjects
    rows: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for cell_id, cell in at.table.snapshot([subjects.column(name, "eval") for name in COLUMNS]):
        with suppress(CodecError):  # a malformed cell is left out, and its row with it
            rows[cell_id.step, cell_id.index][cell_id.field] = at.table.read(cell.data, COLUMNS[cell_id.field])
    complete = {key: row for key, row in rows.items() if len(row) == len(COLUMNS)}
    if not complete:
        sys.exit(
            f"show.py: run {at.config.run.name} has no evaluated rows with media; it needs [eval] and a [media] model"
        )
    version = max(step for step, _ in complete)
    family = family_of(at.config.model_path)
    found = [shown(at, row, family) for (step, _), row in sorted(complete.items()) if step == version]
    return version, found[:count]


def shown(at: Connected, row: dict[str, Any], family: Family | None) -> Shown:
    """Draw a row."""
    prompt, texts, rewards = row["prompt"], row["trajectory"].texts, row["reward"].values
    media = [drawn(at, medium, prompt.media[medium.source], family) for medium in row["media"].media]
    return Shown(prompt_as_read(prompt.text, media), prompt.answer, texts[0], float(rewards[0]))


def prompt_as_read(text: str, media: list[str]) -> str:
    """Put drawn media in the places where the text of a prompt has its markers; the others come first."""
    pieces = SPAN.split(text)
    written = [f"<pre>{escape(printable(piece))}</pre>" if piece.strip() else "" for piece in pieces]
    places = min(len(pieces) - 1, len(media))
    before, placed = media[: len(media) - places], media[len(media) - places :]
    html = "".join(before) + written[0]
    for medium, piece in zip([*placed, *[""] * (len(pieces) - 1 - places)], written[1:], strict=True):
        html += medium + piece
    return html


def task_of(at: Connected) -> str:
    """Describe the task of a run: its data, and what counts as right."""
    source = at.config.eval.data or at.config.data
    where = source.path or source.function or source.task or source.kind
    asked = f"; the system message is: {source.system}" if source.system else ""
    reward = at.config.eval.reward or at.config.reward.function
    return f"Task: prompts of {where}{asked}. The reward of an answer is {reward}, and 1 is the best."


def drawn(at: Connected, medium: Any, source: Any, family: Family | None) -> str:
    """Draw the features of a medium, with its name, and a player if its file can be read."""
    with suppress(RelaxError):
        array = at.table.store.read(medium.features)
        if medium.kind == "audio":
            picture = embedded("image/png", spectrogram(array))
        elif family is not None and family.vision is not None:
            picture = embedded("image/png", strip(frames_of(array, medium.grid, family.vision)))
        played = player(Path(at.table.store.path(source.path) if source.stored else source.path))
        grid = " x ".join(str(size) for size in medium.grid)
        caption = f"{medium.kind}, {grid}, {medium.tokens} tokens: {printable(source.name)}"
        return f'<img src="{picture}" alt="{medium.kind}">{played}<div class="of">{escape(caption)}</div>'
    return '<div class="of">its features are gone</div>'


def player(path: Path) -> str:
    """Embed a sound or a video that browsers play, if it is small."""
    kind = PLAYED.get(path.suffix.lower())
    if kind is None or not path.is_file() or path.stat().st_size > MAX_PLAYED_BYTES:
        return ""
    tag = kind.partition("/")[0]
    return f'<{tag} controls src="{embedded(kind, path.read_bytes())}"></{tag}>'


def embedded(kind: str, content: bytes) -> str:
    """Return a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def page(title: str, task: str, rows: list[Shown]) -> str:
    """Write the page; all texts are escaped."""
    title, task = escape(printable(title)), escape(printable(task))
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "expected", "answer", "reward"))
    lines = [
        f"<tr><td>{row.prompt}</td><td><pre>{escape(printable(row.expected))}</pre></td>"
        f'<td class="{"good" if row.reward >= 1 else "bad"}"><pre>{escape(printable(row.answer))}</pre></td>'
        f"<td>{row.reward:.2f}</td></tr>"
        for row in rows
    ]
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{task}</p><table><tr>{head}</tr>{''.join(lines)}</table></body></html>\n"
    )


def main() -> None:
    """Write the page of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="name or folder of the run")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--output", type=Path, help="by default samples.html in the folder of the run")
    options = parser.parse_args()
    try:
        with connected(options.run) as at:
            version, rows = read_rows(at, options.rows)
            target = options.output or at.folder.root / "samples.html"
            title = f"{at.config.run.name}: held-out answers of version {version}"
            target.write_text(page(title, task_of(at), rows))
    except RelaxError as error:
        sys.exit(f"show.py: {error}")
    print(f"{target}: {len(rows)} rows")


if __name__ == "__main__":
    main()
