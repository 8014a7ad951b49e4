"""Frames of videos: which are taken, how they are turned, and what is refused."""

from __future__ import annotations

import time

import numpy as np
import pytest

from relax_actors.config.media import LimitsSection, MediaSection, VideoSection
from relax_actors.errors import ConfigError, RowError, SlowRowError
from relax_actors.media import Features, process
from relax_actors.media.decode_video import decode_frames, read_timeline
from relax_actors.media.source import Source
from tests.support.media_files import (
    frames_of,
    gif_file,
    growing_video_file,
    image_file,
    picture,
    sound_file,
    tone,
    video_file,
    wav_file,
)
from tests.support.media_models import family
from tests.support.messages import assert_says

SMALL = VideoSection(fps=2.0, min_frames=1, max_frames=16, min_pixels=256, max_pixels=32 * 32)


def features(data: bytes, settings: VideoSection = SMALL, model: str = "qwen3_vl", **options: float) -> Features:
    return process(data, "video", family(model), MediaSection(video=settings), name="a.mp4", **options)[0]


def brightness(data: bytes, indices: list[int] | None = None) -> list[int]:
    """Return the mean of each sampled frame, of all frames by default."""
    source = Source(data, "a.mp4", LimitsSection())
    timeline = read_timeline(source, (0.0, None))
    wanted = np.arange(len(timeline.times)) if indices is None else timeline.at(np.array(indices))
    clip = decode_frames(source, timeline, wanted, lambda frame: frame)
    return [round(float(frame.mean())) for frame in clip.frames]


def message(data: bytes, limits: LimitsSection | None = None, **options: float) -> str:
    with pytest.raises(RowError) as caught:
        settings = MediaSection(video=SMALL, limits=limits or LimitsSection())
        process(data, "video", family("qwen3_vl"), settings, name="a.mp4", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("mov", "mpeg4"),
    ],
)
def test_containers_and_codecs_are_read(container: str, codec: str) -> None:
    frames = frames_of(12)
    found = brightness(video_file(frames, container=container, codec=codec))
    assert len(found) == 12
    assert np.abs(np.array(found) - [frame.mean() for frame in frames]).max() < 6


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_any_number_of_frames_gives_whole_temporal_patches(count: int, model: str) -> None:
    found = features(video_file(frames_of(count), 2), model=model)
    expected = count if model == "qwen3_vl" else max(count // 2 * 2, 1)
    assert found.frames == expected
    t, h, w = found.grid.tolist()
    assert t == -(-expected // 2)
    assert found.array.shape == (t * h * w, 3 * 2 * 8 * 8)
    assert len(found.timestamps) == t
    assert found.seconds == pytest.approx(count / 2)


def test_last_frame_fills_up_the_last_temporal_patch() -> None:
    found = features(video_file(frames_of(3), 2))
    pairs = found.array.reshape(2, -1, 3, 2, 64)
    assert np.array_equal(pairs[1, :, :, 0], pairs[1, :, :, 1])
    assert not np.array_equal(pairs[0, :, :, 0], pairs[0, :, :, 1])


def test_rate_and_bounds_choose_the_frames() -> None:
    data = video_file(frames_of(40), 10)
    assert features(data, VideoSection(fps=2.0)).frames == 8
    assert features(data, VideoSection(fps=0.1, min_frames=6)).frames == 6
    assert features(data, VideoSection(fps=10.0, max_frames=12)).frames == 12
    assert features(data, VideoSection(fps=10.0, max_frames=12)).seconds_per_grid == pytest.approx(2 * 4 / 12)


def test_pixels_of_frames_and_of_the_whole_video_are_bounded() -> None:
    data = video_file(frames_of(8, 96, 128), 2)
    for model in ("qwen3_vl", "qwen2_5_vl"):
        frame = features(data, VideoSection(min_pixels=256, max_pixels=4096), model)
        assert frame.grid[1] * frame.grid[2] * 64 <= 4096
        total = features(data, VideoSection(min_pixels=256, total_pixels=8 * 2048), model)
        assert total.grid[1] * total.grid[2] * 64 * 8 <= 8 * 2048
        assert features(data, VideoSection(min_pixels=256, multiple=32), model).grid[1] % 4 == 0


def test_frames_of_a_variable_rate_are_taken_by_time() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 4.0]
    data = video_file(frames_of(10), times=times)
    levels = brightness(data)
    assert brightness(data, [0, 9]) == [levels[0], levels[9]]
    # The middle in time, 2.0 s, is nearest to the frame at 0.8 s.
    assert brightness(data, [4]) == [levels[8]]
    found = features(data, VideoSection(fps=1.0, min_frames=2, max_frames=4, min_pixels=256))
    assert found.timestamps[-1] <= 4.0


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_display_matrix_turns_the_frames(rotation: int) -> None:
    frame = np.zeros((32, 64, 3), np.uint8)
    frame[:16, :32] = 255
    source = Source(video_file([frame] * 3, rotation=rotation), "a.mp4", LimitsSection())
    clip = decode_frames(source, read_timeline(source, (0.0, None)), np.array([1]), lambda image: image)
    turned = np.rot90(frame, rotation // 90)
    assert clip.frames[0].shape == turned.shape
    assert np.abs(clip.frames[0].astype(int) - turned).mean() < 12


def test_part_of_a_video_has_its_own_times() -> None:
    frames = frames_of(40)
    found = features(video_file(frames, 10), VideoSection(fps=10.0, min_pixels=256), start=1.0, end=2.0)
    assert found.frames == 10
    assert found.timestamps[0] == pytest.approx(0.05)
    assert found.seconds == pytest.approx(1.0)


def test_animated_gif_is_a_video() -> None:
    found = features(gif_file(5, 0.1), VideoSection(fps=10.0, min_pixels=256))
    assert found.frames == 5
    assert found.seconds == pytest.approx(0.5)


def test_single_image_is_no_video() -> None:
    expected = "a video is expected, and this is a png image"
    assert message(image_file(picture())) == f"a.mp4: {expected}"


def test_video_without_frames_is_refused() -> None:
    assert_says(message(wav_file(tone())), "a.mp4", "no video")
    assert_says(message(sound_file(tone(), 16_000, "mp4", "aac")), "a.mp4", "no video")


@pytest.mark.parametrize("container", ["mp4", "matroska", "webm", "avi"])
@pytest.mark.parametrize("part", [0.02, 0.4, 0.8])
def test_truncated_video_is_refused(container: str, part: float) -> None:
    codec = "libvpx-vp9" if container == "webm" else "libx264"
    data = video_file(frames_of(60), 10, container=container, codec=codec)
    text = message(data[: int(len(data) * part)])
    assert text.startswith("a.mp4: ")
    assert any(word in text for word in ("truncated", "damaged", "no frames", "no video"))


def test_limits_are_checked_before_decoding() -> None:
    data = video_file(frames_of(30), 10)
    assert_says(message(data, LimitsSection(max_frames=20)), "a.mp4", "frames", "20", "raise the limit")
    assert_says(message(data, LimitsSection(max_seconds=2)), "a.mp4", "3.0 s", "2 s", "raise the limit")
    assert_says(message(data, LimitsSection(max_pixels=1000)), "a.mp4", "96 x 64", "1000", "raise the limit")


def test_playlists_are_not_followed() -> None:
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    for data in (playlist, b"ffconcat version 1.0\nfile '/etc/passwd'\n"):
        expected = "a video is expected, and this is no container that is read (mp4, webm, mkv, wav, mp3, ...)"
        assert message(data) == f"a.mp4: {expected}"


def test_deadline_ends_decoding_of_a_video() -> None:
    with pytest.raises(SlowRowError):
        process(
            video_file(frames_of(30)),
            "video",
            family("qwen3_vl"),
            MediaSection(video=SMALL),
            deadline=time.monotonic(),
        )


def test_part_without_frames_is_refused() -> None:
    data = video_file(frames_of(20), 10)
    assert_says(message(data, start=5.0), "a.mp4", "5 s", "2.0 s")
    assert_says(message(data, start=2.0, end=1.0), "a.mp4", "2 s to 1 s", "empty")


def test_sound_of_a_video_is_a_second_medium() -> None:
    data = video_file(frames_of(20), 10, sound=tone(2.0))
    settings = MediaSection(video=VideoSection(fps=2.0, min_pixels=256, audio=True))
    of = family("qwen2_5_omni_thinker")
    video, sound = process(data, "video", of, settings)
    assert (video.kind, sound.kind, video.inside, sound.inside) == ("video", "audio", False, True)
    assert sound.seconds == pytest.approx(2.0, abs=0.1)
    (alone,) = process(data, "video", of, MediaSection(video=VideoSection(fps=2.0, min_pixels=256)))
    assert np.array_equal(alone.array, video.array)
    (silent,) = process(video_file(frames_of(20)), "video", of, settings)
    assert silent.kind == "video"
    with pytest.raises(ConfigError) as caught:
        process(data, "video", family("qwen3_vl"), settings)
    assert_says(caught.value, "video.audio", "qwen3_vl", "switch it off")


def test_frames_that_grow_before_the_first_wanted_one_are_refused() -> None:
    limits = LimitsSection(max_pixels=40 * 40)
    for side, what in (
        (48, "48 x 48 pixels exceed the limit of 1600 pixels; reduce it or raise the limit"),
        (512, "frame 2 of the video is damaged, or exceeds the limit of 1600 pixels"),
    ):
        data = growing_video_file([32, 32, side, side, 32, 32, 32, 32])
        assert message(data, limits, start=1.0) == f"a.mp4: {what}"
