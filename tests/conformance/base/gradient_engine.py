"""Suite of a `TrainingEngine` that computes gradients: what it trains, and what it must not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import train
from relax_actors.engines.protocols.training import SupportsAsyncSave, SupportsScore
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from tests.conformance.base.training_engine import PROMPTS, MakeEngine, TrainingEngineConformance, begun, folder_of
from tests.support.batches import answers, batch_of, parts_of, silent, with_advantages, with_noise_outside_the_mask
from tests.support.models import STOP


def check_turns(stayed: Any, left: Any, folder: Path) -> None:
    """Train two engines alike, of which one leaves its device in the middle of steps and between them."""
    path, away = folder / "published", folder / "away"
    for step in range(2):
        first, *others = parts_of(batch_of(step))
        for engine in (stayed, left):
            engine.accumulate(first, silent)
        assert left.release_memory(away) > 0
        assert left.release_memory(away) == 0
        assert left.resume_memory() > 0
        assert left.resume_memory() == 0
        for engine in (stayed, left):
            for part in others:
                engine.accumulate(part, silent)
        a, b = stayed.step(step, silent), left.step(step, silent)
        assert a.metrics == b.metrics
        size = left.release_memory(away)
        write = left.delta() or left.publish  # read while they are away
        assert write(path) == left.fingerprint() == stayed.fingerprint()
        left.remember()
        left.resume_memory()
        assert list(away.iterdir()) == []  # its file has no name
    folders = folder_of(folder / "stayed"), folder_of(folder / "left")
    stayed.save(folders[0])
    left.save(folders[1])
    files = [{f.relative_to(root): f.read_bytes() for f in root.rglob("*") if f.is_file()} for root in folders]
    assert files[0] == files[1]
    assert left.release_memory(away) == size  # whatever was read and written meanwhile


class GradientConformance(TrainingEngineConformance):
    """Laws of engines that compute a model of Hugging Face format.

    `make` takes settings of section `trainer`, and `algorithm`, settings of that section.
    """

    def test_memory_that_goes_to_the_disk_meanwhile_changes_no_bit(self, make: MakeEngine, tmp_path: Path) -> None:
        settings = {"precision": "bfloat16"}  # with deltas, whose base leaves too
        check_turns(begun(make(**settings)), begun(make(**settings)), tmp_path)

    def test_values_of_tokens_outside_the_loss_mask_change_nothing(self, make: MakeEngine) -> None:
        one, other = begun(make()), begun(make())
        a = train(one, batch_of(1), 0, silent).metrics
        b = train(other, with_noise_outside_the_mask(batch_of(1), 9), 0, silent).metrics
        assert a == b
        assert one.fingerprint() == other.fingerprint()

    def test_a_step_without_rows_is_an_error(self, engine: Any) -> None:
        with pytest.raises(ValueError, match="no rows were accumulated"):
            engine.step(0, silent)

    def test_warm_start_learns_the_answers(self, make: MakeEngine) -> None:
        engine = make()
        engine.initialise(5)
        losses = [engine.warm_start(answers(PROMPTS, [1, 2, STOP]), 1e-2, silent).metrics["loss"] for _ in range(30)]
        assert losses[-1] < losses[0] / 3

    def test_micro_batches_change_nothing_but_rounding(self, make: MakeEngine) -> None:
        found, counts = [], []
        for budget in (20, 10_000):
            engine = begun(make(max_tokens_per_microbatch=budget, learning_rate=1e-3))
            metrics = train(engine, batch_of(0), 0, silent).metrics
            found.append((metrics["loss"], metrics["grad_norm"], metrics["ratio_p99"]))
            counts.append(metrics["micro_batches"])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-6)
        assert counts[0] > counts[1] == 1

    def test_shared_prefixes_change_nothing_but_rounding(self, make: MakeEngine) -> None:
        found, scores, counts = [], [], []
        for shares in (True, False):
            engine = begun(make(share_prefixes=shares, max_tokens_per_microbatch=40, learning_rate=1e-3))
            batch = batch_of(0)
            if isinstance(engine, SupportsScore):
                scores.append(np.concatenate(engine.score(batch, silent)))
            metrics = train(engine, batch, 0, silent).metrics
            found.append((metrics["loss"], metrics["grad_norm"], metrics["ratio_p99"]))
            counts.append(metrics["micro_batches"])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-6)
        for shared, alone in zip(*scores, strict=True) if scores else ():
            np.testing.assert_allclose(shared, alone, rtol=1e-4, atol=1e-5)
        assert counts[0] < counts[1]

    def test_rows_accumulated_one_by_one_give_the_step_of_the_whole_batch(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        # With a larger epsilon the first step of Adam does not amplify the rounding of tiny gradients.
        settings = {"learning_rate": 1e-3, "epsilon": 1e-5}
        whole, parted = begun(make(**settings)), begun(make(**settings))
        a = train(whole, batch_of(1), 0, silent).metrics
        for part in parts_of(batch_of(1)):
            parted.accumulate(part, silent)
        b = parted.step(0, silent).metrics
        for name in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)
        ours, theirs = (self.published(engine, tmp_path / f"{n}") for n, engine in enumerate((whole, parted)))
        for name, tensor in ours.items():
            np.testing.assert_allclose(tensor.numpy(), theirs[name].numpy(), atol=5e-5)

    @staticmethod
    def published(engine: Any, path: Path) -> dict[str, Any]:
        """Tensors as they are published."""
        assert engine.publish(path) == engine.fingerprint()
        return weights.load([path])

    def test_a_part_is_computed_when_it_is_accumulated(self, make: MakeEngine) -> None:
        engine = begun(make(max_tokens_per_microbatch=20))
        early: list[None] = []
        for part in parts_of(batch_of(1)):
            engine.accumulate(part, lambda: early.append(None))
        late: list[None] = []
        metrics = engine.step(0, lambda: late.append(None)).metrics
        assert len(early) >= metrics["micro_batches"] > len(late)

    def test_a_step_interrupted_between_two_parts_has_the_same_bits(self, make: MakeEngine, tmp_path: Path) -> None:
        parts, folder = parts_of(batch_of(1)), folder_of(tmp_path / "checkpoint")
        engine = begun(make())
        engine.save(folder)
        for part in parts[:2]:
            engine.accumulate(part, silent)
        assert self.published(engine, tmp_path / "early").keys()  # the publisher reads weights during a step
        engine.discard()
        for part in parts:
            engine.accumulate(part, silent)
        metrics, found = engine.step(0, silent).metrics, engine.fingerprint()
        for again in (engine, make()):
            again.load(folder)
            for part in parts:
                again.accumulate(part, silent)
            assert again.step(0, silent).metrics == metrics
            assert again.fingerprint() == found

    def test_scores_are_the_log_probs_that_the_next_update_starts_from(self, make: MakeEngine) -> None:
        engine = begun(make({"proximal": "trainer"}, learning_rate=1e-2))
        assert isinstance(engine, SupportsScore)
        calls: list[None] = []
        batch = batch_of(1)
        scored = engine.score(batch, lambda: calls.append(None))
        assert calls
        assert all(not found[~sample.loss_mask].any() for found, sample in zip(scored, batch, strict=True))
        again = [replace(s, logprobs=found, proximal_logprobs=found) for s, found in zip(batch, scored, strict=True)]
        first, second = (train(engine, again, 0, silent).metrics for _ in range(2))
        assert first["abs_delta"] < 1e-5 < second["abs_delta"]
        assert first["clipped"] == 0 < second["clipped"]

    def test_the_constant_loss_divides_by_samples_and_length(self, make: MakeEngine) -> None:
        """Dr. GRPO, arXiv 2503.20783: it is the token loss but for a factor, however the step is cut."""
        batch, length = batch_of(1), 7
        metrics = train(begun(make({"aggregate": "token_mean"})), batch, 0, silent).metrics
        factor = metrics["tokens"] / (len(batch) * length)
        section = {"aggregate": "constant", "length": length}
        for budget in (20, 10_000):
            engine = begun(make(section, max_tokens_per_microbatch=budget))
            for part in parts_of(batch):
                engine.accumulate(part, silent)
            found = engine.step(0, silent).metrics
            for name in ("loss", "grad_norm"):
                np.testing.assert_allclose(found[name], metrics[name] * factor, rtol=1e-4, atol=1e-6)

    def test_a_checkpoint_written_during_the_next_step_is_of_the_moment_of_the_call(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        one = begun(make())
        assert isinstance(one, SupportsAsyncSave)
        train(one, batch_of(0), 0, silent)
        folder = folder_of(tmp_path / "checkpoint")
        fingerprint, finish = one.fingerprint(), one.begin_save(folder)
        train(one, batch_of(1), 1, silent)
        finish()
        assert one.fingerprint() != fingerprint
        other = make()
        other.load(folder)
        assert other.fingerprint() == fingerprint
        train(other, batch_of(1), 1, silent)
        assert other.fingerprint() == one.fingerprint()

    @pytest.mark.parametrize("precision", ["bfloat16", "float32"])
    def test_small_steps_are_published_as_deltas_in_half_precision_only(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        engine = begun(make(precision=precision, learning_rate=1e-6))
        assert engine.delta() is None
        engine.remember()
        before = self.published(engine, tmp_path / "before")
        assert {str(tensor.dtype) for tensor in before.values()} == {f"torch.{precision}"}
        for step in range(3):
            train(engine, batch_of(step), step, silent)
        write = engine.delta()
        assert (write is not None) == (precision == "bfloat16")
        if write is not None:
            assert write(tmp_path / "delta") == engine.fingerprint() == engine.publish(tmp_path / "whole")
            assert (tmp_path / "delta").stat().st_size < 0.5 * (tmp_path / "whole").stat().st_size
            deltas.apply(before, weights.load([tmp_path / "delta"]))
            assert weights.fingerprint(before) == engine.fingerprint()

    @pytest.mark.parametrize("precision", ["bfloat16", "float16"])
    def test_half_precision_resumes_exactly_from_steps_that_it_cannot_represent(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        settings = {"precision": precision, "learning_rate": 1e-6}
        one = begun(make(**settings))
        for step in range(3):
            train(one, batch_of(step), step, silent)
        one.save(folder := folder_of(tmp_path / "checkpoint"))
        other = make(**settings)
        other.load(folder)
        a, b = train(one, batch_of(3), 3, silent), train(other, batch_of(3), 3, silent)
        assert a.metrics == b.metrics
        assert one.fingerprint() == other.fingerprint()

    def test_an_overflow_in_float16_skips_the_update_and_halves_the_loss_scale(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        settings = {"precision": "float16", "loss_scale": {"initial": 2.0**17, "growth_interval": 1}}
        one = begun(make(**settings))
        untrained, found = one.fingerprint(), []
        for step in range(12):
            found.append(dict(train(one, batch_of(step), step, silent).metrics))
            if found[-1]["skipped_updates"]:
                assert "grad_norm" not in found[-1]
                assert step or one.fingerprint() == untrained
            if step == 1:
                one.save(folder := folder_of(tmp_path / "checkpoint"))
        assert one.fingerprint() != untrained
        scales, skipped = [m["loss_scale"] for m in found], [m["skipped_updates"] for m in found]
        assert scales[0] == 2.0**17
        assert skipped[0] == 1  # a gradient of a logit is above the largest number of float16
        assert 0 in skipped
        steps = zip(pairwise(scales), skipped[:-1], strict=True)
        assert all(after == scale / 2 for (scale, after), skip in steps if skip)
        assert any(after == 2 * scale for scale, after in pairwise(scales))
        other = make(**settings)
        other.load(folder)
        resumed = [dict(train(other, batch_of(step), step, silent).metrics) for step in range(2, 12)]
        assert resumed == found[2:]
        assert other.fingerprint() == one.fingerprint()

    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
    def test_the_exported_folder_holds_the_published_weights(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        from transformers import AutoModelForCausalLM

        from relax_actors.engines.torch.model import tensors_of
        from relax_actors.engines.torch.stored_weights import fingerprint_of

        engine = begun(make(precision=precision))
        train(engine, batch_of(0), 0, silent)
        engine.export(tmp_path / "model")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert weights.fingerprint(tensors_of(loaded)) == engine.fingerprint()
        assert fingerprint_of(tmp_path / "model") == engine.fingerprint()

    def test_a_diverged_loss_is_an_error_and_not_a_step(self, engine: Any) -> None:
        before = engine.fingerprint()
        with pytest.raises(FloatingPointError, match=r"^the gradient norm is (nan|inf)$"):
            train(engine, with_advantages(batch_of(0), np.inf), 0, silent)
        assert engine.fingerprint() == before
