"""Role `media` on a real server: features shared by rows, made again when lost, collected, and bad files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import xxhash

from broker.shared_files import SharedFiles
from broker.subjects import RowId
from broker.table import Table
from relax_actors.data.download import Downloads, download
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.task import Medium, Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import DownloadError, RowError, StoreError
from relax_actors.media import load_frames, load_image, load_sound
from relax_actors.messages import Evaluation, MediaSource, PreparedPrompt, Prompt
from relax_actors.monitoring.render import fields_of
from relax_actors.roles.media import MediaRole
from relax_actors.roles.reward import with_files
from relax_actors.runtime import Context, Row
from relax_actors.training.collector import Collector
from relax_actors.training.media_preparer import MediaPreparer
from relax_actors.training.row_media import RowMedia
from tests.support.contexts import context_of
from tests.support.http_servers import served, serving
from tests.support.messages import assert_says
from tests.support.running import IMAGES
from tests.support.tiny_images import png, write_sound, write_video

STEP = RowId(3, 0)
MakeMedia = Callable[..., "Media"]


class Media:
    """One incarnation of the role, and the maker of its prompts."""

    def __init__(self, context: Context) -> None:
        self.context, config = context, context.config
        self.role = MediaRole()
        self.role.context = context
        self.role.setup()
        admission = admission_of(config, context.table.store)
        self.maker = PromptMaker(config.data, Tokenizer(config.model_path), room(config), 6, admission)

    def put(self, task: Task, row: RowId = STEP) -> Prompt:
        """Write the prompt of a row."""
        prompt = self.maker.make(task, row, seed=1, min_version=0)
        self.context.table.put(self.context.table.subject(row, "prompt"), prompt)
        return prompt

    def prepare(self, row: RowId = STEP) -> PreparedPrompt:
        """Handle a row as the pump does."""
        table = self.context.table
        cell = table.get(table.subject(row, "prompt"))
        assert cell is not None
        ((_, value),) = next(iter(self.role.stream([Row(row, {"prompt": cell.data}, table.store)], lambda _: ())))
        if isinstance(value, Exception):
            raise value
        assert isinstance(value, PreparedPrompt)
        return value


@pytest.fixture
def make_media(table: Table, tmp_path: Path) -> MakeMedia:
    def make(*settings: str) -> Media:
        own = (f'media.folders=["{tmp_path}"]', *settings)
        return Media(context_of(table, tmp_path, "media", own, 1, IMAGES))

    return make


def pictures(*seeds: int) -> Task:
    return Task("<image>" * len(seeds) + "7>", media=tuple(Medium("image", data=png(seed)) for seed in seeds))


def links(media: Media) -> dict[str, int]:
    """Number of links of the shared files by their suffix and number."""
    folder = media.context.table.store.root / "media"
    return {path.name: path.stat().st_nlink for path in folder.iterdir()}


def test_rows_with_one_file_share_its_features_and_reading_gives_them_back(make_media: MakeMedia) -> None:
    media = make_media()
    rows = [RowId(3, 0), RowId(3, 1), RowId(4, 0)]
    for row in rows:
        media.put(pictures(1, 1), row)
    prepared = [media.prepare(row) for row in rows]
    assert media.role.metrics()["media_processed"] == 1
    assert media.role.metrics()["media_shared"] == 5
    first = prepared[0]
    assert len(first.tokens) == 4 * 2 + 2
    assert [(one.start, one.tokens, one.source) for one in first.media] == [(1, 2, 0), (5, 2, 1)]
    assert set(links(media).values()) == {3}  # the file, and a link for each of the two steps
    found = RowMedia(media.context).of(first, rows[0])
    assert [item.start for item in found.items] == [1, 5]
    assert found.items[0].features.dtype == np.uint8
    np.testing.assert_array_equal(found.items[0].features, found.items[1].features)
    preparer = MediaPreparer(media.context.config, media.context.table.store)
    in_memory = preparer.features(media.put(pictures(1), RowId(5, 0)).media[0])
    np.testing.assert_array_equal(found.items[0].features, in_memory[0].array)


def test_media_that_no_row_uses_are_removed(make_media: MakeMedia) -> None:
    media = make_media()
    store = media.context.table.store
    for row in (RowId(3, 0), RowId(4, 0)):
        media.put(pictures(row.step), row)
        media.prepare(row)
    store.remove("group/3")
    shared = SharedFiles(store)
    assert shared.remove_orphans(60) == 0
    assert shared.remove_orphans(0) == 2
    assert set(links(media).values()) == {2}
    assert media.prepare(RowId(4, 0)).media


def test_media_of_an_evaluation_without_a_result_are_kept_although_a_later_one_has_one(make_media: MakeMedia) -> None:
    held_out = ("eval.data.kind=python", "eval.data.function=tiny_images.make", "eval.data.size=9")
    media = make_media("eval.rows=1", "eval.every=1", *held_out)
    table = media.context.table
    files = [table.store.root / f"eval/{version}/media.raw" for version in (1, 2, 3, 4)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    for version in (1, 3, 4):
        table.put(table.subjects.numbered("evaluation", version), Evaluation(version, 0.5, 1, {}))
    Collector(media.context, ("media", "trainer"), {"evaluation": Evaluation}).sweep()
    table.store.close()
    assert [file.exists() for file in files] == [False, True, False, True]


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_lost_segment_is_made_again_with_the_same_bits(make_media: MakeMedia, damage: str) -> None:
    media = make_media()
    media.put(pictures(1, 2))
    prepared = media.prepare()
    reference = prepared.media[1].features
    path = media.context.table.store.path(reference.uri)
    expected = RowMedia(media.context).of(prepared, STEP).items[1].features.copy()
    if damage == "removed":
        path.unlink()
        (path.parents[2] / "media" / path.name.removeprefix("media.")).unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    reader = RowMedia(media.context)
    np.testing.assert_array_equal(reader.of(prepared, STEP).items[1].features, expected)
    assert reader.rebuilt == 1


def test_a_segment_that_is_another_when_made_again_is_lost(make_media: MakeMedia, tmp_path: Path) -> None:
    media = make_media()
    file = tmp_path / "a.png"
    file.write_bytes(png(1))
    media.put(Task("<image>7>", media=(Medium("image", path=str(file)),), origin="row 1"))
    prepared = media.prepare()
    media.context.table.store.remove(prepared.media[0].features.uri)
    media.context.table.store.remove("media")
    file.write_bytes(png(2))
    with pytest.raises(StoreError, match=r"has changed .* xxh3:") as caught:
        RowMedia(media.context).of(prepared, STEP)
    assert f"row 1: image {str(file)!r}" in str(caught.value)


def test_a_file_that_changed_after_admission_quarantines_its_row(make_media: MakeMedia, tmp_path: Path) -> None:
    media = make_media()
    file = tmp_path / "a.png"
    file.write_bytes(png(1))
    (source,) = media.put(Task("<image>7>", media=(Medium("image", path=str(file)),), origin="row 1")).media
    file.write_bytes(png(2))
    with pytest.raises(RowError) as caught:
        media.prepare()
    assert_says(caught.value, "row 1", repr(str(file)), "has changed", f"xxh3:{source.xxh3_128}", "restore the file")


def test_a_file_that_is_no_image_is_refused_with_its_name_and_row(make_media: MakeMedia) -> None:
    media = make_media()
    media.put(Task("<image>7>", media=(Medium("image", data=png(1)[:40]),), origin="row 1"))
    with pytest.raises(RowError, match=r"^row 1: image: "):
        media.prepare()
    media.put(pictures(2), RowId(3, 1))
    assert media.prepare(RowId(3, 1)).media  # the next row is handled


def test_media_longer_than_the_context_are_refused(make_media: MakeMedia) -> None:
    media = make_media("media.image.max_pixels=65536", "media.image.min_pixels=65536")
    media.put(Task("<image>7>", media=(Medium("image", data=png(1, 256, 256)),), origin="row 1"))
    with pytest.raises(RowError) as caught:
        media.prepare()
    assert_says(caught.value, "row 1", "prompt of 260", "122", "rollout.max_tokens = 6", "max_pixels", "data.oversize")


def test_prompt_with_media_is_kept_where_its_source_says_so(make_media: MakeMedia) -> None:
    held_out = ("eval.data.kind=python", "eval.data.function=tiny_images.make", "eval.data.size=9", "eval.rows=1")
    media = make_media("media.image.max_pixels=30976", "data.oversize=keep", *held_out)
    task = Task("<image>7>", media=(Medium("image", data=png(1, 176, 176)),), origin="row 1")
    media.put(task)
    assert len(media.prepare().tokens) == 125  # of 128; a completion may have 6
    media.put(task, RowId(3, 0, "eval"))
    with pytest.raises(RowError, match=r"prompt of 125.* 122 .*rollout\.max_tokens = 6"):
        media.prepare(RowId(3, 0, "eval"))


def test_settings_of_a_row_replace_those_of_the_run(make_media: MakeMedia) -> None:
    media = make_media()
    big, small = (Medium("image", data=png(1, 64, 64), options={"max_pixels": n}) for n in (1024, 256))
    media.put(Task("<image><image>7>", media=(big, small)))
    prepared = media.prepare()
    assert [one.tokens for one in prepared.media] == [4, 1]


def test_a_video_is_prepared_and_views_say_what_it_is(make_media: MakeMedia, tmp_path: Path) -> None:
    media = make_media()
    file = write_video(tmp_path / "a.mp4")
    media.put(Task("<video>7>", media=(Medium("video", path=str(file), end=0.75),)))
    prepared = media.prepare()
    (one,) = prepared.media
    assert one.kind == "video"
    assert one.grid.tolist() == [len(RowMedia(media.context).of(prepared, STEP).items[0].features) // 16, 4, 4]
    table = media.context.table
    cell = table.get(table.subject(STEP, "prompt"))
    assert cell is not None
    assert f'"video, {file.stat().st_size} bytes, 0 s to 0.75 s, {file}"' in fields_of(cell.data)
    shown = fields_of(table.encode(table.subject(STEP, "media"), prepared))
    assert f"patches, {one.tokens} tokens, uint8[" in shown
    assert f" in {one.features.uri}" in shown


def test_rewards_open_the_files_of_media(make_media: MakeMedia, tmp_path: Path) -> None:
    media = make_media()
    store = media.context.table.store
    prompt = with_files(media.put(pictures(1)), store)
    assert load_image(prompt.media[0].path).shape == (16, 32, 3)
    assert load_frames(write_video(tmp_path / "a.mp4"), 3).shape == (3, 32, 32, 3)
    assert load_sound(write_sound(tmp_path / "a.wav"), 8000).shape == (4000,)
    outside = replace(prompt, media=[replace(prompt.media[0], path="../../etc/passwd", stored=True)])
    with pytest.raises(StoreError, match="points outside the store"):
        with_files(outside, store)


def test_the_generator_of_tasks_gives_every_row_its_pictures(make_media: MakeMedia) -> None:
    media = make_media()
    tasks = open_data(media.context.config.data, media.context.config.media)
    for index in (0, 4, 6):
        row = RowId(9, index)
        media.put(tasks[index], row)
        assert len(media.prepare(row).media) == len(tasks[index].media)


def source_of(url: str, data: bytes) -> MediaSource:
    digest = xxhash.xxh3_128_hexdigest(data)
    return MediaSource("image", f"group/3/media.{digest}.raw", digest, stored=True, url=url, origin="row 1")


def test_urls_are_downloaded_once_within_limits_and_with_their_hash(make_media: MakeMedia) -> None:
    media = make_media("media.urls.allow=true", "media.urls.private=true", "media.urls.max_bytes=4096")
    assert media.context.config.media is not None
    store, picture = media.context.table.store, png(1)
    downloads = Downloads(media.context.config.media, store, lambda: None)
    with served({"/a.png": picture, "/big.png": bytes(5000)}) as url:
        source = source_of(f"{url}/a.png", picture)
        for _ in range(2):
            downloads.fetch(source)
        assert downloads.count == 1
        assert store.path(source.path).read_bytes() == picture
        with pytest.raises(RowError, match=r"^row 1: image .*/a\.png has hash [0-9a-f]{32}, not [0-9a-f]{32}"):
            downloads.fetch(source_of(f"{url}/a.png", b"other"))
        with pytest.raises(RowError, match=r"media\.urls\.max_bytes = 4096; raise it"):
            downloads.fetch(source_of(f"{url}/big.png", bytes(5000)))
        with pytest.raises(RowError, match=r"404; correct the URL"):
            downloads.fetch(source_of(f"{url}/gone.png", b"gone"))
        strict = media.context.config.media.urls.model_copy(update={"private": False})
        own = media.context.config.media.model_copy(update={"urls": strict})
        with pytest.raises(RowError, match=r"127\.0\.0\.1, which is not public"):
            Downloads(own, store, lambda: None).fetch(source_of(f"{url}/b.png", b"b"))
    with pytest.raises(DownloadError, match=r"^row 1: image .*/c\.png: ConnectError: "):
        downloads.fetch(source_of(f"{url}/c.png", b"c"))


def test_redirections_are_checked_like_the_url_itself(make_media: MakeMedia) -> None:
    """The first host is allowed; the server then sends on to others, and to itself for ever."""
    media = make_media("media.urls.allow=true", "media.urls.private=true", "media.urls.hosts=['127.0.0.1']")
    assert media.context.config.media is not None
    picture, asked = png(1), list[str]()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name = self.path.removeprefix("/")
            self.send_response(200 if name == "picture" else 302)
            if name != "picture":
                port = self.headers["Host"].rpartition(":")[2]
                targets = {"relative": "/picture", "other": f"http://localhost:{port}/picture", "ever": "/ever"}
                self.send_header("Location", targets.get(name, "file:///etc/passwd"))
            self.end_headers()
            self.wfile.write(picture if name == "picture" else b"")

        def log_message(self, *arguments: object) -> None:
            pass

    urls = media.context.config.media.urls
    with serving(Server) as url:
        assert download(f"{url}/relative", urls) == picture
        for name, expected in (
            ("other", "host localhost is not in media.urls.hosts; add it, or download the file"),
            ("file", "file:///etc/passwd is neither http nor https; download the file"),
            ("ever", f"more than 5 redirections, the last to {url}/ever"),
        ):
            with pytest.raises(RowError) as caught:
                download(f"{url}/{name}", urls)
            assert str(caught.value) == expected
    assert asked == ["/relative", "/picture", "/other", "/file", *["/ever"] * 5]
