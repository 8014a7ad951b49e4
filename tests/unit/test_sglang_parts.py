"""Parts of the SGLang engine that need no server, and the CPU replacement of sglang-kernel."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols import GenerationRequest, StopStrings
from relax_actors.engines.sglang import float8_blocks, launch, presence
from relax_actors.engines.sglang.float8_blocks import dequantised, quantised
from relax_actors.engines.sglang.partial_sample import PartialSample, routed_experts
from relax_actors.engines.sglang.row_streams import SampleLimit
from relax_actors.engines.sglang.weight_loaders import StagedWeights, to_checkpoint_names
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.errors import ActorError, EngineError, RelaxError
from relax_actors.messages import FinishReason
from relax_actors.weights import files as weights
from tests.support.quantised import WIDE, weight_in_float8
from tests.support.sglang_servers import config_of as run_with
from tests.support.text_families import MEGATRON, TORCH

NAMED = {"3:a": 3, "4:b": 4}


def request(**fields: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"samples": 2, "temperature": 0.9, "top_p": 0.8, "max_tokens": 10}
    settings |= {"stop_ids": frozenset([7])} | fields
    return GenerationRequest(np.array([1, 2], np.int32), 5, **settings)


def chunk(tokens: list[int], done: int, reason: Any = None, spans: list[tuple[str, int, int]] | None = None) -> Any:
    meta: dict[str, Any] = {"completion_tokens": done, "finish_reason": reason}
    meta["output_token_logprobs"] = [[-0.5 * token, token, None] for token in tokens]
    if spans:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"output_ids": tokens, "meta_info": meta}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans())
def test_sample_is_the_same_from_incremental_and_cumulative_messages(parts: list[int], cumulative: bool) -> None:  # noqa: FBT001
    sample = PartialSample(request(max_tokens=20), 0)
    sample.request_started()
    tokens = list(range(10, 10 + sum(parts)))
    done = 0
    for i, length in enumerate(parts):
        done += length
        last = i == len(parts) - 1
        reason = {"type": "length"} if last else None
        spans = [("3:a", 0, 1), ("4:b", 1, done)] if last else None
        sent = tokens[:done] if cumulative else tokens[done - length : done]
        assert sample.add_chunk(chunk(sent, done, reason, spans), 3, NAMED) is last
    found = sample.result()
    assert found.tokens.tolist() == tokens
    assert found.logprobs.tolist() == [-0.5 * token for token in tokens]
    assert found.versions.tolist() == [3] + [4] * (len(tokens) - 1)
    assert found.finish_reason is FinishReason.LENGTH


def test_sample_of_a_broken_request_continues_after_its_tokens() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    sample.add_chunk(chunk([5, 6], 2), 3, NAMED)
    before = sample.parameters()
    sample.request_broken(keep=True)
    assert sample.prompt == [1, 2, 5, 6]
    assert sample.parameters()["max_new_tokens"] == 8
    assert sample.parameters()["sampling_seed"] == before["sampling_seed"]
    sample.request_started()
    assert sample.add_chunk(chunk([8, 7], 2, {"type": "stop"}, [("4:b", 0, 2)]), 4, NAMED)
    found = sample.result()
    assert (found.tokens.tolist(), found.versions.tolist()) == ([5, 6, 8, 7], [3, 3, 4, 4])
    assert found.finish_reason is FinishReason.STOP


def test_tokens_of_uncertain_version_are_generated_again() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    sample.add_chunk(chunk([5, 6], 2), 3, NAMED)
    sample.swapped()
    sample.add_chunk(chunk([8, 9], 4), 4, NAMED)
    sample.request_broken(keep=True)
    assert sample.prompt == [1, 2, 5, 6]
    sample.request_broken(keep=False)
    assert sample.prompt == [1, 2]


def stopping(**fields: Any) -> PartialSample:
    """A sample that ends with the tokens 8 and 9."""
    strings = StopStrings(["89"], lambda token: str(token).encode())
    sample = PartialSample(request(stop_strings=strings, **fields), 0)
    sample.request_started()
    return sample


def test_sample_ends_at_the_token_that_completes_a_stop_string() -> None:
    sample = stopping()
    assert not sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
    assert not sample.is_stopped
    assert not sample.add_chunk(chunk([9, 5, 6], 5), 3, NAMED)
    assert sample.is_stopped
    # Tokens sampled before the request is aborted are dropped; its end reports the versions.
    assert not sample.add_chunk(chunk([1], 6), 3, NAMED)
    abort = {"type": "abort", "message": "Aborted"}
    assert sample.add_chunk(chunk([2, 3], 8, abort, [("3:a", 0, 1), ("4:b", 1, 8)]), 3, NAMED)
    found = sample.result()
    assert (found.tokens.tolist(), found.versions.tolist()) == ([5, 8, 9], [3, 4, 4])
    assert found.logprobs.tolist() == [-2.5, -4.0, -4.5]
    assert found.finish_reason is FinishReason.STOP


def test_no_stop_string_begins_in_the_prompt_or_ends_before_min_tokens() -> None:
    strings = StopStrings(["25"], lambda token: str(token).encode())  # the prompt ends with 2
    sample = PartialSample(request(stop_strings=strings, min_tokens=3), 0)
    sample.request_started()
    assert not sample.add_chunk(chunk([5, 2, 5, 2], 4), 3, NAMED)
    assert not sample.is_stopped
    assert sample.add_chunk(chunk([5, 1], 6, {"type": "length"}, [("3:a", 0, 6)]), 3, NAMED)
    assert sample.result().tokens.tolist() == [5, 2, 5, 2, 5]
    assert sample.finish_reason is FinishReason.STOP


def test_stop_string_is_completed_after_a_broken_request() -> None:
    sample = stopping()
    sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
    sample.request_broken(keep=True)
    sample.request_started()
    sample.add_chunk(chunk([9], 1), 3, NAMED)
    assert sample.is_stopped
    sample.request_broken(keep=True)
    assert (sample.finish_reason, sample.result().tokens.tolist()) == (FinishReason.STOP, [5, 8, 9])


def test_sample_that_has_ended_starts_again_with_its_row() -> None:
    sample = stopping()
    assert sample.add_chunk(chunk([5, 8, 9], 3, {"type": "length"}, [("3:a", 0, 3)]), 3, NAMED)
    sample.request_broken(keep=False)
    assert (sample.finish_reason, sample.is_stopped, sample.prompt) == (None, False, [1, 2])


def test_stop_string_with_a_token_of_uncertain_version_is_generated_again() -> None:
    for keep, prompt in ((True, [1, 2, 5, 8]), (False, [1, 2])):
        sample = stopping()
        sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
        sample.swapped()
        sample.add_chunk(chunk([9, 5], 4), 4, NAMED)
        assert sample.is_stopped
        sample.request_broken(keep=keep)
        assert (sample.finish_reason, sample.is_stopped, sample.prompt) == (None, False, prompt)
        sample.request_started()
        sample.add_chunk(chunk([9, 5], 2), 4, NAMED)
        assert sample.is_stopped is keep


def test_experts_of_a_sample_with_a_stop_string_are_cut_like_its_tokens() -> None:
    moe = MoeFacts(layers=1, experts=8, experts_of_token=2, without=[])
    strings = StopStrings(["89"], lambda token: str(token).encode())
    end = chunk([8, 9, 5, 6], 4, {"type": "length"}, [("3:a", 0, 4)])
    reported = np.arange(10, dtype="<i4").reshape(5, 1, 2) % 8
    sample = PartialSample(request(stop_strings=strings), 0, moe)
    sample.request_started()
    end["meta_info"]["routed_experts"] = base64.b64encode(reported.tobytes()).decode()
    assert sample.add_chunk(end, 3, NAMED)
    found = sample.result().routed_experts
    assert found is not None
    np.testing.assert_array_equal(found, reported[:3])
    # Aborted in the queue of the server, which then reports no experts.
    sample = PartialSample(request(stop_strings=strings), 0, moe)
    sample.request_started()
    sample.add_chunk(chunk([8, 9, 5], 3), 3, NAMED)
    assert sample.add_chunk(chunk([5], 3, {"type": "abort"}, [("3:a", 0, 3)]), 3, NAMED)
    found = sample.result().routed_experts
    assert found is not None
    assert (found.shape, found.dtype, set(found.ravel())) == ((3, 1, 2), np.int16, {-1})


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"])
def test_weights_get_their_checkpoint_names(tmp_path: Path, name: str) -> None:
    architecture = (MEGATRON | TORCH)[name]
    model, parts = build(run_with(tmp_path / "run", architecture).model_path, seed=3), presence.RENAMED.get(name, ())
    model.save_pretrained(tmp_path / "saved")
    stored = weights.load([tmp_path / "saved" / "model.safetensors"])
    named = to_checkpoint_names(tensors_of(model), parts=parts)
    assert len([one for one in named if ".experts." in one]) >= 4
    assert {name: tensor.tolist() for name, tensor in named.items()} == {n: t.tolist() for n, t in stored.items()}
    assert to_checkpoint_names(named, parts=parts).keys() == named.keys()


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("mistral", {}, "sliding_window = 4, which SGLang ignores for mistral; .* max_position_embeddings = 64 to 4"),
        ("mistral", {"sliding_window": 64}, ""),
        ("mistral", {"sliding_window": None}, ""),
        ("qwen2", {"head_dim": 8}, ""),
        ("qwen2", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4}, "sliding_window = 4"),
        ("qwen2", {}, "has head_dim = 16, and SGLang gives heads of qwen2 .* = 8 dimensions"),
        ("mixtral", {}, "has head_dim = 16, and SGLang gives heads of mixtral"),
        ("gemma3", {}, "tie_word_embeddings = false, and SGLang computes logits of gemma3_text with the embeddings"),
        ("gemma3", {"tie_word_embeddings": True}, ""),
        ("qwen3", {}, ""),
        ("qwen3_moe", {}, ""),
        ("qwen3_moe dense", {}, r"mlp_only_layers = \[0\], and SGLang gives all layers of qwen3_moe experts"),
        (
            "qwen2_moe",
            {"head_dim": 8, "decoder_sparse_step": 2},
            "decoder_sparse_step = 2, and SGLang gives all",
        ),
    ],
)
def test_models_that_sglang_would_compute_otherwise_are_named(name: str, fields: dict[str, Any], why: str) -> None:
    found = presence.difference((MEGATRON | TORCH)[name] | fields)
    assert re.search(why, found) if why else not found


def test_aborted_request_keeps_its_tokens() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    assert sample.add_chunk(chunk([5, 6], 2, {"type": "abort", "message": "Aborted"}, [("3:a", 0, 2)]), 3, NAMED)
    assert (sample.finish_reason, sample.prompt) == (None, [1, 2, 5, 6])


@pytest.mark.parametrize(
    ("message", "error", "why"),
    [
        (chunk([5], 1, {"type": "length"}, [("9:z", 0, 1)]), ActorError, "which this actor did not load"),
        (chunk([5], 3), EngineError, "from position 2; 0 were received"),
        (chunk([], 0, {"type": "abort", "status_code": 400, "message": "too long"}), EngineError, "too long"),
    ],
)
def test_invalid_messages_of_a_server_are_errors(message: Any, error: type[RelaxError], why: str) -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    with pytest.raises(error, match=why):
        sample.add_chunk(message, 3, NAMED)


def test_samples_have_different_seeds_and_greedy_ones_the_most_likely_token() -> None:
    one, other = (PartialSample(request(), i).parameters() for i in range(2))
    assert one["sampling_seed"] != other["sampling_seed"]
    assert 0 <= one["sampling_seed"] < 2**63
    assert (one["stop_token_ids"], one["ignore_eos"], one["top_p"]) == ([7], False, 0.8)
    with_greedy = request(samples=3, greedy_samples=1)
    assert [PartialSample(with_greedy, i).parameters()["top_p"] < 1e-5 for i in range(3)] == [False, False, True]
    assert PartialSample(request(samples=1, greedy_samples=1), 0).parameters()["top_p"] < 1e-5
    assert PartialSample(request(stop_ids=frozenset()), 0).parameters()["ignore_eos"] is True


@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.booleans(), max_size=200))
def test_limit_of_samples_stays_within_bounds_and_recovers(rows: int, group: int, retractions: list[bool]) -> None:
    most = rows * group
    samples = SampleLimit(most, group)
    for retracted in retractions:
        before = samples.limit
        samples.finished(group, retracted=retracted)
        assert 1 <= samples.limit <= most
        assert not retracted or samples.limit == max(1, before // 2)
    for _ in range(rows * (most + 1)):
        samples.finished(group, retracted=False)
    assert samples.limit == most


def test_routed_experts_are_decoded_or_refused() -> None:
    moe = MoeFacts(layers=3, experts=300, experts_of_token=2)
    first = np.random.default_rng(0).integers(0, 299, (9, 3))
    chosen = np.stack([first, first + 1], -1).astype("<i4")
    text = base64.b64encode(chosen.tobytes()).decode()
    found = routed_experts(text, 9, moe)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, chosen)
    mixed = MoeFacts(layers=2, experts=300, experts_of_token=2, without=(1,))
    chosen[:, 1] = 0  # a layer without experts chooses nothing
    encoded = base64.b64encode(chosen.tobytes()).decode()
    np.testing.assert_array_equal(routed_experts(encoded, 9, mixed), chosen[:, [0, 2]])
    for wrong, tokens, why in (
        (text, 8, r"not \[8, 3, 2\]"),
        ("", 9, r"not \[9, 3, 2\]"),
        (base64.b64encode(np.full((9, 3, 2), 5, "<i4").tobytes()).decode(), 9, "chosen twice"),
    ):
        with pytest.raises(EngineError, match=why):
            routed_experts(wrong, tokens, moe)


def test_sample_has_the_experts_of_its_last_request() -> None:
    sample = PartialSample(request(max_tokens=3), 0, MoeFacts(layers=1, experts=4, experts_of_token=2))
    sample.request_started()
    message = chunk([5, 6, 8], 3, {"type": "length"}, [("3:a", 0, 3)])
    chosen = np.array([[[0, 1]], [[2, 3]], [[1, 3]], [[0, 2]]], "<i4")
    message["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    sample.add_chunk(message, 3, NAMED)
    np.testing.assert_array_equal(sample.result().routed_experts, chosen)


def test_experts_of_tokens_from_older_weights_are_missing() -> None:
    sample = PartialSample(request(max_tokens=3), 0, MoeFacts(layers=1, experts=4, experts_of_token=2))
    sample.request_started()
    sample.swapped()
    message = chunk([5, 6, 8], 3, {"type": "length"}, [("3:a", 0, 2), ("4:b", 2, 3)])
    chosen = np.array([[[0, 1]], [[2, 3]], [[1, 3]], [[0, 2]]], "<i4")
    message["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    sample.add_chunk(message, 4, NAMED)
    found = sample.result()
    assert found.versions.tolist() == [3, 3, 4]
    assert found.routed_experts is not None
    # The tokens of version 3 were sampled after the prompt's last token and the first generated one.
    assert found.routed_experts[:, 0].tolist() == [[0, 1], [-1, -1], [-1, -1], [0, 2]]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 5)])
def test_blocks_of_a_weight_have_scales_of_their_own(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.linspace(1e-3, 10, shape[1])
    values, scales = quantised(weight.bfloat16())
    assert (values.dtype, values.shape, scales.dtype) == (torch.float8_e4m3fn, shape, torch.float32)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    found, exact = dequantised(values, scales), weight.bfloat16().float()
    torch.testing.assert_close(found, weight_in_float8(exact), rtol=1e-6, atol=0)
    # float8 has three bits behind the point, and steps of 2^-9 below 2^-6.
    steps = torch.maximum(exact.abs() / 16, scales.max() * 2**-10)
    assert ((found - exact).abs() <= steps * (1 + 1e-5)).all()


def test_a_large_weight_is_quantised_in_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn((700, 200), generator=torch.Generator().manual_seed(1))
    whole = quantised(weight)
    monkeypatch.setattr(float8_blocks, "AT_ONCE", 2 * 128 * 200)
    stripes = quantised(weight)
    assert torch.equal(stripes[0].view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(stripes[1], whole[1])


def test_fields_that_a_user_replaces_stay_beside_those_of_fp8(tmp_path: Path) -> None:
    name, fields = "--json-model-override-args", '{"rope_theta": 5}'
    for number, arguments in enumerate(([name, fields], [f"{name}={fields}"])):
        served = {"quantization": "fp8", "arguments": arguments}
        config = run_with(tmp_path / str(number), WIDE, rollout={"sglang": served})
        _, fields = launch.config_arguments(config, config.model_path)
        assert json.loads(fields).keys() == {"rope_theta", "architectures", "quantization_config"}
    config = run_with(tmp_path / "none", WIDE, rollout={"sglang": {"quantization": "fp8"}})
    assert json.loads(launch.config_arguments(config, config.model_path)[1]).keys() == {
        "architectures",
        "quantization_config",
    }


def test_a_block_of_zeros_is_kept() -> None:
    values, scales = quantised(torch.zeros(128, 256))
    assert scales.gt(0).all()
    assert dequantised(values, scales).eq(0).all()


def test_quantised_weights_are_named_on_the_server() -> None:
    assert StagedWeights(3, "ab").identity == "3:ab"
    assert StagedWeights(3, "ab", "fp8").identity == "3:ab:fp8"
