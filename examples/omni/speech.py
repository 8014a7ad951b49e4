"""Spoken digits, by the speech synthesiser espeak-ng: voices x pitches x speeds, test voices apart."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from relax_actors import ConfigError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+m3", "en-us+f2", "en-gb+m1", "en-gb+f4", "en-us+m7")
TEST_VOICES = ("en-us+f3", "en-gb+m5")
PITCHES, SPEEDS = (30, 50, 70), (140, 175, 210)  # espeak-ng's units: 0 to 99, and words a minute
_QUIET = 300  # of 32,767: below it there is silence around the word


@dataclass(frozen=True)
class Spoken:
    """A digit spoken in one way; it is spoken when its file is first asked for."""

    value: int
    voice: str
    pitch: int
    speed: int
    program: str

    @property
    def name(self) -> str:
        """File name without a suffix."""
        return f"{self.voice}-{self.pitch}-{self.speed}-{self.value}"

    @cached_property
    def wav(self) -> bytes:
        """The WAV file: mono, 16 bits, without silence around the word.

        Raises:
            ConfigError: espeak-ng fails.
        """
        voice = ["-v", self.voice, "-p", str(self.pitch), "-s", str(self.speed)]
        command = [self.program, *voice, "--stdout", WORDS[self.value]]
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 a fixed list of arguments
        if done.returncode:
            msg = f"{' '.join(command)} failed: {done.stderr.decode(errors='replace').strip()!r:.200}"
            raise ConfigError(msg)
        return trimmed(done.stdout)


def spoken(*, test: bool) -> list[Spoken]:
    """Return each digit with each voice, pitch and speed, of the training or the test voices.

    Raises:
        ConfigError: espeak-ng is not installed.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        msg = "the spoken digits need espeak-ng, which is not installed; apt install espeak-ng (Debian, Ubuntu)"
        raise ConfigError(msg)
    settings = product(TEST_VOICES if test else VOICES, PITCHES, SPEEDS, range(10))
    return [Spoken(value, voice, pitch, speed, program) for voice, pitch, speed, value in settings]


def trimmed(wav: bytes) -> bytes:
    """Cut the silence around the word of a mono WAV file of 16 bits."""
    with wave.open(io.BytesIO(wav)) as reader:
        rate, samples = reader.getframerate(), np.frombuffer(reader.readframes(reader.getnframes()), np.int16)
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > _QUIET)
    target = io.BytesIO()
    with wave.open(target, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples[loud[0] : loud[-1] + 1].tobytes())
    return target.getvalue()
