"""Samples of a row, drawn again with the recorded weights and seed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import torch

from broker.process import spawn, stop
from broker.subjects import RowId
from relax_actors.algorithms.advantages.estimation import needs_greedy
from relax_actors.config import Config
from relax_actors.config.placement import PlacementSection
from relax_actors.data.prompt_maker import room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols import Generation, GenerationRequest, InferenceEngine
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.errors import CodecError, ConfigError, StoreError, SubjectError
from relax_actors.generation.sampling import sampling_of, template_of
from relax_actors.messages import PreparedPrompt, Prompt, Trajectory
from relax_actors.replay.exactness import why_samples_inexact
from relax_actors.replay.recording import Recording
from relax_actors.replay.steps import Replayer
from relax_actors.runtime.row import parse_row
from relax_actors.supervision.node import actor_environment
from relax_actors.supervision.pools import server_launch
from relax_actors.training.row_media import MEDIA, RowMedia
from relax_actors.training.stops import stops_of

POLL_SECONDS = 0.1


def row_of(name: str) -> RowId:
    """Parse a training row, `group.412.3` or `412.3`; raises ConfigError."""
    try:
        row = parse_row(name if name.startswith("group.") else f"group.{name}")
    except SubjectError as error:
        msg = f"{name!r} is no row: {error}; write group.STEP.INDEX or STEP.INDEX, such as 412.3"
        raise ConfigError(msg) from error
    return row


def sample_again(recording: Recording, row: RowId, settings: list[str]) -> dict[str, Any]:
    """Sample a row again and compare tokens and log-probs with the recorded ones.

    Args:
        recording: record of the run.
        row: training row.
        settings: settings to sample with in place of the recorded ones.

    Raises:
        ConfigError: the row was not kept, or does not follow from version and seed alone.
    """
    config = recording.config_with(settings)
    _require_reproducible(recording.run, config)
    prompt, trajectory = _cell(recording, row, "prompt", Prompt), _cell(recording, row, "trajectory", Trajectory)
    versions = np.unique(trajectory.versions[trajectory.versions >= 0]).tolist()
    if len(versions) != 1:
        msg = f"{row} was sampled by versions {versions}, whose swaps a replay cannot repeat"
        raise ConfigError(msg)
    (version,) = versions
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    samples = _sampled(recording, config, row, prompt, version)
    difference = first_difference(trajectory, samples)
    return {
        "run": recording.run,
        "row": str(row),
        "version": version,
        "samples": len(samples),
        "tokens": {"recorded": len(trajectory.token_ids), "computed": sum(len(s.tokens) for s in samples)},
        "equal": difference is None,
        "difference": difference,
        "settings": settings,
        "inexact": why_samples_inexact(config.rollout.device, gpu),
    }


def _require_reproducible(run: str, config: Config) -> None:
    """Raise ConfigError if the samples of a row do not follow from its weights and seed."""
    why = ""
    if config.from_data:
        why = "its rows come from data: nothing is sampled"
    elif config.environment is not None or config.agent is not None:
        why = "its samples have several turns, which depend on their environment or agent"
    elif config.simulate is not None:
        why = "its engines are simulated: no model sampled the tokens"
    elif not config.run.deterministic:
        why = (
            "it is not deterministic: rows were sampled in batches with others, which changes their rounding; runs "
            "with run.deterministic = true can"
        )
    elif not getattr(inference_backend(config), "repeats_samples", False):
        why = (
            f"rollout.backend = {config.rollout.backend!r} does not say that its samples follow from weights and seed "
            "(`repeats_samples`)"
        )
    elif config.rollout.backend == "sglang" and config.rollout.sglang.urls:
        why = (
            "rollout.sglang.urls names servers that the run did not start, and which may serve others now; servers "
            "that a run starts can be started again"
        )
    if why:
        msg = f"rows of run {run} cannot be sampled again: {why}"
        raise ConfigError(msg)


def _cell(recording: Recording, row: RowId, column: str, expected: type[Any]) -> Any:
    table = recording.table
    try:
        value = table.fetch(table.subject(row, column), expected)
    except (CodecError, StoreError) as error:
        msg = f"cell {row}.{column} of run {recording.run} cannot be read: {error}"
        raise ConfigError(msg) from error
    if value is None:
        keep = recording.at.settings.run.keep_steps
        msg = (
            f"run {recording.run} has no {row}.{column}: the row was never admitted, or is collected already. "
            f"run.keep_steps keeps the rows of the newest steps (it is {keep} here)"
        )
        raise ConfigError(msg)
    return value


def _sampled(recording: Recording, config: Config, row: RowId, prompt: Prompt, version: int) -> list[Generation]:
    """Draw a row's samples with a version of the policy in an inference engine."""
    replayer = Replayer(recording, recording.config, "policy")
    try:
        replayer.advance(version)
        fingerprint, files = replayer.model.publish("sampled")
    finally:
        replayer.model.close()
    with _engine(recording, config) as engine:
        engine.load(version, fingerprint, files)
        tokenizer = Tokenizer(config.model_path)
        sampling = sampling_of(config, row, 1 if needs_greedy(config.algorithm) else 0)
        request = template_of(config, sampling, *stops_of(tokenizer, config.rollout.stop))
        request = _of_prompt(recording, config, row, prompt, request)
        limit = min(engine.context_length, room(config)) - len(request.tokens)
        request = replace(request, max_tokens=max(1, min(request.max_tokens, limit)))
        done = dict(pair for pairs in engine.stream([request], lambda: None) for pair in pairs)
        return list(done[0])


@contextmanager
def _engine(recording: Recording, config: Config) -> Iterator[InferenceEngine]:
    """Build the run's inference engine, with a server that ends with this process.

    Raises:
        ConfigError: the server does not start.
    """
    context, backend = recording.context("rollout", config), inference_backend(config)
    with ExitStack() as stack:
        if backend.server(config) is not None:
            folder = context.folder
            folder.root.mkdir(exist_ok=True)
            # The server shares its device with no actor of the replay, so it waits for no turn.
            alone = config.model_copy(update={"placement": PlacementSection()})
            folder.save_config(alone, recording.at.folder.import_path)
            launch = server_launch(folder, context.n, actor_environment(config))
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            with launch.log.open("wb") as log:
                keeper = spawn(launch.command, log=log, environment=os.environ | launch.environment)
            stack.callback(stop, keeper, config.supervision.shutdown)
            _await_server(folder.server(context.n), keeper, launch.log, config.supervision.longest_start)
        engine = backend.build(context)
        stack.callback(engine.close)
        yield engine


def _await_server(record: Path, keeper: Popen[bytes], log: Path, seconds: float) -> None:
    """Wait until an inference server generates."""
    end = time.monotonic() + seconds
    while ServerRecord.load(record) is None:
        ended = keeper.poll() is not None
        if ended or time.monotonic() > end:
            how = "ended" if ended else f"does not generate within {seconds:g} s (supervision.start_deadline)"
            said = log.read_text(errors="replace").strip()[-2000:]
            msg = f"the inference server that is to sample the row {how}; it wrote: {said or 'nothing'}"
            raise ConfigError(msg)
        time.sleep(POLL_SECONDS)


def _of_prompt(
    recording: Recording, config: Config, row: RowId, prompt: Prompt, request: GenerationRequest
) -> GenerationRequest:
    """Return a request with the tokens, media and seed of a prompt."""
    if config.media is None:
        return replace(request, tokens=prompt.tokens, seed=prompt.seed)
    prepared = _cell(recording, row, MEDIA, PreparedPrompt)
    media = RowMedia(recording.context("rollout", config)).of(prepared, row)
    return replace(request, tokens=prepared.tokens, seed=prompt.seed, media=media)


def first_difference(recorded: Trajectory, computed: Sequence[Generation]) -> dict[str, Any] | None:
    """Return where samples part from a trajectory, with both values, or None."""
    tokens, logprobs = recorded.token_ids, recorded.logprobs
    start = 0
    for number, (length, sample) in enumerate(zip(recorded.sample_lengths.tolist(), computed, strict=False)):
        own = slice(start, start + length)
        start += length
        common = min(length, len(sample.tokens))
        pairs = (("token", tokens[own], sample.tokens), ("logprob", logprobs[own], sample.logprobs))
        for what, mine, theirs in pairs:
            unequal = np.flatnonzero(mine[:common] != theirs[:common])
            if len(unequal):
                at = int(unequal[0])
                values = {"recorded": mine[at].item(), "computed": theirs[at].item()}
                return {"sample": number, "position": at, "what": what, **values}
        if length != len(sample.tokens):
            lengths = {"recorded": length, "computed": len(sample.tokens)}
            return {"sample": number, "position": common, "what": "length", **lengths}
    if len(recorded.sample_lengths) != len(computed):
        return {"what": "samples", "recorded": len(recorded.sample_lengths), "computed": len(computed)}
    return None
