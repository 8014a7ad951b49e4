"""The examples of images, speech, videos, and pictures with speech, in a short form; and their page of samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.messages import PreparedPrompt, Prompt
from relax_actors.monitoring.connection import connected
from tests.support.omni_data import EXAMPLES, omni_module, small_data
from tests.support.running import Run, relax

SHORT = (
    "run.steps=3",
    "trainer.prompts_per_step=4",
    "trainer.warm_start.steps=2",
    "trainer.warm_start.rows=4",
    "eval.every=0",
)
HELD_OUT = 6
KINDS = {"image": ["image"], "sound": ["audio"], "video": ["video"], "omni": ["image", "audio"]}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("task", [*KINDS])
def test_task_trains_and_its_held_out_rows_are_shown(tmp_path: Path, task: str) -> None:
    settings = [*SHORT, *small_data(task, tmp_path / "data", held_out=HELD_OUT), f"eval.rows={HELD_OUT}"]
    run = Run(tmp_path, task, settings, config=EXAMPLES / f"{task}.toml")
    result = run.complete()
    assert (result["steps"], result["trained"], result["quarantined"], result["in_flight"]) == (3, 12, 0, 0)
    assert "the ledger is complete" in relax("ledger", str(run.folder.root), cwd=tmp_path).stdout
    with connected(str(run.folder.root)) as at:
        for index in range(HELD_OUT):
            row = f"{at.table.subjects.prefix}.eval.3.{index}"
            prompt, prepared = at.table.fetch(f"{row}.prompt", Prompt), at.table.fetch(f"{row}.media", PreparedPrompt)
            assert prompt is not None
            assert prepared is not None
            assert [medium.kind for medium in prepared.media] == KINDS[task]
            # One token for each placeholder in the prompt, as many as the medium takes in the prepared one.
            assert len(prepared.tokens) >= len(prompt.tokens) + sum(medium.tokens - 1 for medium in prepared.media)
    shown = subprocess.run(
        [sys.executable, str(EXAMPLES / "show.py"), str(run.folder.root)], capture_output=True, text=True, check=False
    )
    page = run.folder.root / "samples.html"
    assert (shown.returncode, shown.stdout) == (0, f"{page}: {HELD_OUT} rows\n"), shown.stderr
    html = page.read_text()
    assert "Task: prompts of " in html
    assert not any(f"&lt;|{kind}" in html for kind in ("image", "video", "audio", "vision"))
    assert html.count("data:image/png;base64,") == HELD_OUT * len(KINDS[task])
    assert html.count("<audio controls") == (HELD_OUT if "audio" in KINDS[task] else 0)


def test_page_of_samples_escapes_what_data_and_model_wrote() -> None:
    show = omni_module("show")
    hostile = "</pre><script>alert(1)</script>\x1b[2J\u202e&amp;\" onload='x'"
    prompt = show.prompt_as_read(f"{hostile}<|vision_start|><|image_pad|><|vision_end|>{hostile}", ["<img>"])
    html = show.page(hostile, hostile, [show.Shown(prompt, hostile, hostile, 0.5)])
    body = html.partition("<body>")[2]
    assert "<script" not in html
    assert not any(mark in html for mark in ("\x1b", "\u202e", "onload='x'", "<pre></pre>"))
    assert body.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 6
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    ("text", "media", "shown"),
    [
        ("a<|vision_start|><|image_pad|><|vision_end|>b", ["<1>"], "<pre>a</pre><1><pre>b</pre>"),
        ("<|audio_bos|><|AUDIO|><|audio_eos|><image>?", ["<1>", "<2>"], "<1><2><pre>?</pre>"),
        ("no marker", ["<1>"], "<1><pre>no marker</pre>"),
        ("<image> and <image>", ["<1>"], "<1><pre> and </pre>"),
    ],
)
def test_media_stand_where_the_prompt_has_its_markers(text: str, media: list[str], shown: str) -> None:
    assert omni_module("show").prompt_as_read(text, media) == shown


def test_pictures_are_put_together_from_their_patches() -> None:
    np, cv2 = pytest.importorskip("numpy"), pytest.importorskip("cv2")
    from relax_actors.media.family import VisionSpec
    from relax_actors.media.vision import to_patches

    drawing = omni_module("drawing")
    spec = VisionSpec(8, 2, 2, (0.5,) * 3, (0.5,) * 3, (1, 2), (1, 2), whole_video=False)
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), np.uint8)
    for temporal in (1, 2):
        assert (drawing.frames_of(*to_patches(frames, spec, temporal), spec) == frames).all()
    strip = cv2.imdecode(np.frombuffer(drawing.strip(frames), np.uint8), cv2.IMREAD_COLOR)
    assert (strip[:, 48:96, ::-1] == frames[1]).all()
    sound = cv2.imdecode(np.frombuffer(drawing.spectrogram(np.zeros((16, 9), np.float32)), np.uint8), -1)
    assert sound.shape == (16, 9, 3)
