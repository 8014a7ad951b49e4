"""Sounds of every container, rate and number of channels become log-mel spectrograms."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from relax_actors.config.media import AudioSection, LimitsSection, MediaSection
from relax_actors.errors import ConfigError, RowError
from relax_actors.media import Features, process
from relax_actors.media.decode_audio import decode_audio
from relax_actors.media.resample import resample
from relax_actors.media.source import Source
from tests.support.media_files import frames_of, image_file, picture, sound_file, tone, video_file, wav_file
from tests.support.media_models import family
from tests.support.messages import assert_says

OMNI = family("qwen3_omni_moe_thinker")


def features(data: bytes, settings: AudioSection | None = None, **options: float) -> Features:
    chosen = MediaSection(audio=settings or AudioSection())
    return process(data, "audio", OMNI, chosen, name="a.wav", **options)[0]


def message(data: bytes, settings: AudioSection | None = None, **options: float) -> str:
    with pytest.raises(RowError) as caught:
        features(data, settings, **options)
    return str(caught.value)


def samples(data: bytes, settings: AudioSection | None = None) -> tuple[np.ndarray, int]:
    found = decode_audio(Source(data, "a.wav", LimitsSection()), settings or AudioSection(), (0.0, None))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("flac", "flac", 44_100), ("ogg", "libopus", 48_000), ("mp3", "libmp3lame", 44_100),
     ("mp4", "aac", 16_000), ("adts", "aac", 16_000), ("matroska", "flac", 16_000), ("aiff", "pcm_s16be", 8000)],
)  # fmt: skip
def test_containers_and_codecs_of_sounds_are_read(container: str, codec: str, rate: int) -> None:
    found, heard = samples(sound_file(tone(1.5, rate), rate, container, codec))
    assert heard == rate
    assert len(found) / rate == pytest.approx(1.5, abs=0.15)
    loudest = np.argmax(np.abs(np.fft.rfft(found[: rate // 2])))
    assert loudest * 2 == pytest.approx(440, abs=4)


@pytest.mark.parametrize("rate", [8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 44_101])
def test_every_rate_gives_the_same_tone(rate: int) -> None:
    found = resample(tone(1.0, rate), rate, 16_000)
    assert len(found) == pytest.approx(16_000, abs=30)
    inner = slice(500, 15_000)
    assert np.abs(found[inner] - tone(1.1)[: len(found)][inner]).max() < (0.06 if rate == 44_101 else 2e-3)
    assert features(wav_file(tone(1.0, rate), rate)).grid.tolist() == [len(found) // 160]


def test_channels_become_one() -> None:
    both = np.stack([tone(), np.zeros(16_000, np.float32)])
    data = wav_file(both)
    assert np.abs(samples(data)[0] - tone() / 2).max() < 1e-4
    assert np.abs(samples(data, AudioSection(mono="first"))[0] - tone()).max() < 1e-4
    refused = 'a.wav: the sound has 2 channels; mix them, or set audio.mono to "mean" or "first"'
    assert message(data, AudioSection(mono="refuse")) == refused


def test_silence_is_a_sound() -> None:
    found = features(wav_file(np.zeros(8000, np.float32)))
    assert found.grid.tolist() == [50]
    assert (found.array == found.array[0, 0]).all()


def test_long_sound_is_refused_or_cut() -> None:
    data = wav_file(tone(3.0))
    refused = "a.wav: 3.0 s of sound exceed audio.max_seconds = 2; cut it, or set audio.truncate"
    assert message(data, AudioSection(max_seconds=2)) == refused
    cut = features(data, AudioSection(max_seconds=2, truncate=True))
    assert np.array_equal(cut.array, features(wav_file(tone(3.0)[:32_000])).array)


def test_part_of_a_sound() -> None:
    data = wav_file(tone(3.0))
    part = features(data, start=1.0, end=2.0)
    assert np.array_equal(part.array, features(wav_file(tone(3.0)[16_000:32_000])).array)
    assert_says(message(data, start=4.0), "a.wav", "4 s", "lasts 3.0 s")


def test_lower_rate_narrows_the_band() -> None:
    noise = np.random.default_rng(0).standard_normal(16_000).astype(np.float32) * 0.1
    wide, narrow = (features(wav_file(noise), AudioSection(sample_rate=rate)).array for rate in (None, 8000))
    assert wide.shape == narrow.shape
    assert (wide[-8:] - narrow[-8:]).mean() > 0.5
    assert np.abs(wide[5:20] - narrow[5:20]).mean() < 0.1
    with pytest.raises(ConfigError) as caught:
        features(wav_file(noise), AudioSection(sample_rate=44_100))
    assert_says(caught.value, "audio.sample_rate = 44100", "16000")


def test_encoder_of_qwen2_audio_gets_its_padding() -> None:
    padded, cut = family("qwen2_audio"), family("qwen2_5_omni_thinker")
    data = wav_file(tone(1.0))
    (whole,) = process(data, "audio", padded, MediaSection())
    assert whole.array.shape == (padded.audio.mels, 3000) if padded.audio else False
    assert whole.grid.tolist() == [100]
    (short,) = process(data, "audio", cut, MediaSection())
    assert short.array.shape[1] == 100


def test_bad_sounds_are_refused() -> None:
    data = wav_file(tone(5.0))
    assert_says(message(image_file(picture())), "a.wav", "png")
    assert message(video_file(frames_of(3))) == "a.wav: the file has no sound"
    assert_says(message(wav_file(tone(0.01))), "a.wav", "10 ms", "30 ms")
    assert message(wav_file(tone(0.0))) == "a.wav: the sound has no samples"
    slow = "a.wav: a sample rate of 500 Hz is outside 1000 to 384000 Hz; convert the sound"
    assert message(wav_file(tone(1.0), 500)) == slow
    cut = message(data[: len(data) // 2])
    assert_says(cut, "a.wav", "truncated", "80022", "160044")


def test_too_long_sound_is_refused_before_decoding() -> None:
    with pytest.raises(RowError) as caught:
        process(wav_file(tone(5.0)), "audio", OMNI, MediaSection(limits=LimitsSection(max_seconds=3)), name="a.wav")
    assert_says(caught.value, "a.wav", "5.0 s", "limit of 3 s", "raise the limit")


def test_the_end_of_a_part_does_not_raise_the_limit() -> None:
    data = sound_file(tone(5.0), 16_000, "adts", "aac")
    with pytest.raises(RowError, match=r"^a\.wav: .* limit of 3 s; shorten"):
        decode_audio(Source(data, "a.wav", LimitsSection(max_seconds=3)), AudioSection(), (0.0, 1e9))


def test_models_without_ears_take_no_sound() -> None:
    with pytest.raises(RowError) as caught:
        process(wav_file(tone()), "audio", family("qwen3_vl"), MediaSection(), name="a.wav")
    assert_says(caught.value, "a.wav", "qwen3_vl", "audio", "image, video")


@pytest.mark.slow
def test_torchaudio_and_models_are_imported_beside_a_torch_that_its_extension_does_not_fit() -> None:
    """The import hook of `make sglang`, where it is installed, helps other programs."""
    code = """import sys
sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("relax_")]
from relax_actors.media.resample import resample
from importlib.util import find_spec
import numpy as np
if find_spec("torchvision") is None:  # whose compiled extension fails in the same way
    import transformers.models.llama.modeling_llama
print(len(resample(np.zeros(44100, np.float32), 44100, 16000)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "16000\n"
