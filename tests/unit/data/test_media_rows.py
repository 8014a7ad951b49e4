"""Media in the rows of a data set: every spelling, what is refused, and what a prompt keeps of it."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import Config, load_config
from relax_actors.data.model_folder import prepare
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.task import Medium, Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError, StoreError
from relax_actors.messages import MediaSource, Prompt
from relax_actors.training.media_preparer import MediaPreparer
from tests.support.messages import assert_says
from tests.support.running import IMAGES, TINY
from tests.support.tiny_images import png

ROW = RowId(7, 0)
PICTURE = png(1)
URI = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
HASH = xxhash.xxh3_128_hexdigest(PICTURE)


class Source:
    """Prompts of one data file."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        (folder / "data" / "a.png").write_bytes(PICTURE)
        own = [f"run.folder={folder / 'run'}", "data.kind=jsonl", f"data.path={folder / 'data' / 'rows.jsonl'}"]
        self.config: Config = load_config(IMAGES, [*own, *settings])
        prepare(self.config, self.config.model_path)
        self.store = Store(folder / "store")
        admission = admission_of(self.config, self.store)
        self.maker = PromptMaker(self.config.data, Tokenizer(self.config.model_path), room(self.config), 6, admission)

    def make(self, row: dict[str, Any]) -> Prompt:
        """Write a row to the file, read it, and make its prompt."""
        (self.folder / "data" / "rows.jsonl").write_text(json.dumps({"prompt": "1>"}) + "\n" + json.dumps(row) + "\n")
        return self.prompt(open_data(self.config.data, self.config.media)[1])

    def prompt(self, task: Task) -> Prompt:
        return self.maker.make(task, ROW, seed=1, min_version=0)

    def error(self, row: dict[str, Any]) -> str:
        with pytest.raises(RowError) as caught:
            self.make(row)
        return str(caught.value)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("source"))


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>7>", "images": ["a.png"]},
        {"prompt": "<image>7>", "image": "a.png"},
        {"prompt": "<image>7>", "images": [{"path": "a.png"}]},
        {"prompt": "<image>7>", "images": [{"path": "a.png", "xxh3": HASH}]},
        {"prompt": "<image>7>", "images": [{"path": "a.png", "sha256": hashlib.sha256(PICTURE).hexdigest()}]},
        {"prompt": "<image>7>", "images": [URI]},
        {"prompt": "<image>7>", "images": [{"bytes": None, "path": "a.png"}], "videos": [], "audios": None},
    ],
)
def test_every_spelling_of_an_image_beside_a_text_is_the_same_prompt(source: Source, row: dict[str, Any]) -> None:
    prompt = source.make(row)
    assert prompt.text == "<|vision_start|><|image_pad|><|vision_end|>7>"
    (medium,) = prompt.media
    assert (medium.kind, medium.xxh3_128, medium.size) == ("image", HASH, len(PICTURE))
    place = source.store.path(medium.path) if medium.stored else Path(medium.path)
    assert place.read_bytes() == PICTURE
    assert prompt.metadata == {}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png", "text": None},
        {"type": "image_url", "image_url": {"url": URI, "detail": "high"}},
        {"type": "input_image", "image_url": URI},
        {"type": "image", "image": {"bytes": None, "path": "a.png"}, "max_pixels": 512},
    ],
)
def test_every_spelling_of_a_content_part_is_a_medium(source: Source, part: dict[str, Any]) -> None:
    task = Task("", origin="o")
    (source.folder / "data" / "rows.jsonl").write_text(
        json.dumps({"prompt": chat(part, {"type": "text", "text": "7>"})})
    )
    task = open_data(source.config.data, source.config.media)[0]
    assert task.prompt == chat({"type": "image"}, {"type": "text", "text": "7>"})
    (medium,) = task.media
    assert medium.data == PICTURE or medium.path == "a.png"
    assert medium.options == ({"max_pixels": 512} if "max_pixels" in part else {})


def test_without_a_chat_template_a_message_of_the_user_is_a_text_and_other_chats_are_refused(source: Source) -> None:
    parts = ({"type": "text", "text": "1"}, {"type": "image", "path": "a.png"}, {"type": "text", "text": "7>"})
    assert source.make({"prompt": chat(*parts)}).text == "1<|vision_start|><|image_pad|><|vision_end|>7>"
    assert source.make({"prompt": [{"role": "user", "content": "7>"}]}).text == "7>"
    said = "{0}: a chat of {1} messages needs a chat template, and the model has none; add chat_template.jinja to its "
    said += "folder, or give a text or a single message of the user"
    where = f"{source.folder / 'data' / 'rows.jsonl'} line 2"
    system = {"role": "system", "content": "2"}
    assert source.error({"prompt": [system, *chat(*parts)]}) == said.format(where, 2)
    assert source.error({"prompt": [system]}) == said.format(where, 1)


def test_media_of_several_kinds_stand_in_the_order_of_their_placeholders(source: Source) -> None:
    (source.folder / "data" / "b.mp4").write_bytes(b"not read at admission")
    row = {"prompt": "1<video>2<image>3<image>>", "images": ["a.png", URI], "videos": [{"path": "b.mp4", "start": 1}]}
    prompt = source.make(row)
    assert [(medium.kind, medium.stored, medium.start) for medium in prompt.media] == [
        ("video", False, 1.0),
        ("image", False, None),
        ("image", True, None),
    ]
    markers = prompt.text.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    assert markers == "1<|video_pad|>2<|image_pad|>3<|image_pad|>>"


def test_bytes_columns_of_parquet_are_media(source: Source) -> None:
    """Hugging Face writes images as a struct of bytes and path."""
    path = source.folder / "data" / "rows.parquet"
    image = {"bytes": PICTURE, "path": "gone.png"}
    rows = [{"prompt": "<image>7>", "images": [image]}, {"prompt": "7>", "images": []}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    data = source.config.data.model_copy(update={"kind": "parquet", "path": path})
    tasks = open_data(data, source.config.media)
    assert source.prompt(tasks[0]).media[0].xxh3_128 == HASH
    assert source.prompt(tasks[1]).media == []
    assert tasks[1].metadata == {}


def test_copies_of_the_data_are_shared_by_the_rows_of_a_step(source: Source) -> None:
    first, second = (source.prompt(Task("<image>7>", media=(Medium("image", data=PICTURE),))) for _ in range(2))
    assert first.media[0].path == second.media[0].path == f"group/7/media.{HASH}.raw"
    assert (source.store.root / "media" / f"{HASH}.raw").stat().st_nlink == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "<image><image>>", "images": ["a.png"]},
            "2 placeholders of kind image, but 1 media of it; add the image, or remove the placeholder",
        ),
        (
            {"prompt": "7>", "images": ["a.png"]},
            "0 placeholders of kind image, but 1 media of it; write <image> where it belongs",
        ),
        (
            {"prompt": "<audio>7>", "audios": ["a.png"]},
            "the prompt has audio, but a qwen3_vl model takes image, video; remove the row, or choose another model",
        ),
        (
            {"prompt": "<image>7>", "images": ["/etc/passwd"]},
            (
                "image '/etc/passwd' lies outside the folder of the data, {folder}; move it there, or add its folder "
                "to media.folders"
            ),
        ),
        (
            {"prompt": "<image>7>", "images": [f"{30 * '../'}etc/passwd"]},
            (
                "image '/etc/passwd' lies outside the folder of the data, {folder}; move it there, or add its folder "
                "to media.folders"
            ),
        ),
        (
            {"prompt": "<image>7>", "images": ["gone.png"]},
            "image '{folder}/gone.png' cannot be read (No such file or directory); correct the path",
        ),
        ({"prompt": "<image>7>", "images": ["."]}, "image '{folder}' is no regular file; correct the path"),
        (
            {"prompt": "<image>7>", "images": ["https://example.org/a.png"]},
            "image https://example.org/a.png is a URL; download it, or set media.urls.allow = true",
        ),
        (
            {"prompt": "<image>7>", "images": [{"path": "a.png", "hash": f"xxh3:{'0' * 32}"}]},
            f"image '{{folder}}/a.png' has hash xxh3:{HASH}, not xxh3:{'0' * 32}; restore the file, or correct the row",
        ),
        (
            {"prompt": "<image>7>", "images": [{"path": "a.png", "max_pixels": -1}]},
            "max_pixels of image: Input should be greater than 0; correct the row",
        ),
        (
            {"prompt": "<image>7>", "images": [{"path": "a.png", "speed": 1}]},
            (
                ", field 'images', item 1: image has an unknown field 'speed'; known: path, url, data, bytes, hash, "
                "digest, xxh3, sha256, min_pixels, max_pixels, multiple"
            ),
        ),
        (
            {"prompt": "<|image_pad|>7>"},
            (
                "the prompt has 1 placeholders (image) for media after tokenization, but its row has 0 (none); write "
                "each as <image>, <video>, <audio> or a content part"
            ),
        ),
    ],
)
def test_media_that_may_not_be_used_are_refused_with_row_and_reason(
    source: Source, row: dict[str, Any], said: str
) -> None:
    said = said.format(folder=source.folder / "data")
    separator = "" if said.startswith(",") else ": "
    assert source.error(row) == f"{source.folder}/data/rows.jsonl line 2{separator}{said}"


def test_an_empty_file_is_refused(source: Source) -> None:
    (source.folder / "data" / "empty.png").touch()
    said = source.error({"prompt": "<image>7>", "images": ["empty.png"]})
    assert said.endswith("empty.png' is empty; write the file again, or remove the row")


def test_folders_and_urls_are_used_where_the_settings_allow_them(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.png").write_bytes(PICTURE)
    source = Source(tmp_path, f'media.folders=["{other}"]', "media.urls.allow=true")
    assert source.make({"prompt": "<image>7>", "images": [f"{other}/b.png"]}).media[0].path == f"{other}/b.png"
    digest = hashlib.sha256(PICTURE).hexdigest()
    (medium,) = source.make({"prompt": "<image>7>", "images": [f"https://example.org/a.png#sha256={digest}"]}).media
    assert (medium.url, medium.sha256, medium.path) == (
        "https://example.org/a.png",
        digest,
        f"group/7/media.{digest}.raw",
    )
    said = source.error({"prompt": "<image>7>", "images": ["https://example.org/a.png"]})
    assert_says(said, "no hash", "`sha256`", "`xxh3`")


def test_rows_of_a_text_model_keep_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<image>7>", "images": ["a.png"]}))
    tiny = load_config(TINY, ["data.kind=jsonl", f"data.path={path}"])
    task = open_data(tiny.data, tiny.media)[0]
    assert tiny.media is None
    assert (task.prompt, task.media, task.metadata) == ("<image>7>", (), {"images": ["a.png"]})


def test_a_text_model_refuses_media(tmp_path: Path) -> None:
    tiny = load_config(TINY, [f"run.folder={tmp_path}"])
    prepare(tiny, tiny.model_path)
    maker = PromptMaker(tiny.data, Tokenizer(tiny.model_path), 64, 6)
    with pytest.raises(RowError, match=r"^o: .*image.*text alone; remove the row$"):
        maker.make(Task("7>", origin="o", media=(Medium("image", path="a"),)), seed=1, min_version=0)


def test_a_prompt_is_the_same_at_each_admission(source: Source) -> None:
    row = {"prompt": "<image>7>", "images": ["a.png"]}
    first, second = source.make(row), source.make(row)
    assert first.media == second.media
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "<video>7>", "videos": [{"path": "a.mp4", "start": 10**400}]},
            f", field 'videos', item 1, 'start': {10**400!s:.40} is no number of seconds",
        ),
        (
            {"prompt": "<image>7>", "images": ["http://a/\ud800"]},
            ", field 'images', item 1: half a surrogate pair in 'http://a/\\ud800'; write the whole character",
        ),
    ],
)
def test_values_that_no_cell_holds_are_errors_of_their_row(source: Source, row: dict[str, Any], said: str) -> None:
    assert source.error(row) == f"{source.folder}/data/rows.jsonl line 2{said}"


def test_settings_of_a_medium_have_the_types_of_the_configuration(source: Source) -> None:
    row = {"prompt": "<image>7>", "images": [{"path": "a.png", "min_pixels": "256", "max_pixels": 1024.0}]}
    options = source.make(row).media[0].options
    assert options == {"min_pixels": 256, "max_pixels": 1024}
    assert [type(value) for value in options.values()] == [int, int]


def test_a_download_that_was_changed_in_the_store_is_lost(source: Source) -> None:
    preparer, path = MediaPreparer(source.config, source.store), "group/7/media.own.raw"
    source.store.write_parts(path, [png(2)])
    medium = MediaSource(
        "image", path, sha256=hashlib.sha256(PICTURE).hexdigest(), stored=True, url="u", origin="row 1"
    )
    with pytest.raises(StoreError, match=rf"not sha256:{medium.sha256}; restore the file"):
        preparer.features(medium)


def test_settings_of_a_data_set_replace_those_of_the_run_and_those_of_a_medium_replace_both(tmp_path: Path) -> None:
    source = Source(tmp_path, "data.media.image.max_pixels=512", "data.media.image.min_pixels=128")
    # As actors read it: a file with every key, also those that were not set.
    assert Config.model_validate_json(source.config.model_dump_json()).data.media == source.config.data.media
    images = [{"path": "a.png"}, {"path": "a.png", "max_pixels": 600}]
    prompt = source.make({"prompt": "<image><image>", "images": images})
    assert [medium.options for medium in prompt.media] == [
        {"min_pixels": 128, "max_pixels": 512},
        {"min_pixels": 128, "max_pixels": 600},
    ]
    for setting, said in (("video.fps=0", "Input should be greater than 0"), ("image.fps=1", "Extra inputs")):
        with pytest.raises(ConfigError, match=rf"data\.media: .*{setting[:-2]}: {said}"):
            load_config(IMAGES, [f"data.media.{setting}"])
