"""Packed sequences give the log-probs of each sequence alone, for all model families, without padding."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.protocols.samples import MicroBatchPlan
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.packing import Packing
from relax_actors.errors import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = [
    Qwen3Config(**SHAPE),
    LlamaConfig(**SHAPE),
    Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    MistralConfig(**SHAPE, sliding_window=5),
    Gemma3TextConfig(**SHAPE, sliding_window=4),
    GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters={"rope_theta": 1e4}
    ),
    DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4},
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "moe_intermediate_size"), 16),
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
    ),
]


def sequences(lengths: list[tuple[int, int]]) -> list[TrainSample]:
    source = np.random.default_rng(1)
    pairs = [(source.integers(0, 50, p, dtype=np.int32), source.integers(0, 50, c, dtype=np.int32)) for p, c in lengths]
    return [TrainSample.of_completion(p, c) for p, c in pairs]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize("lengths", [[(3, 9), (7, 2), (1, 1), (5, 12)], [(4, 6)] * 3], ids=["mixed", "equal"])
def test_packed_log_probs_and_gradients_equal_those_of_each_sequence_alone(
    config: PreTrainedConfig, lengths: list[tuple[int, int]]
) -> None:
    torch.manual_seed(2)
    alone = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()
    packed = AutoModelForCausalLM.from_config(deepcopy(config))
    packed.load_state_dict(alone.state_dict())
    forward = Forward(torch.device("cpu"), torch.float32, 0.7)
    forward.prepare(packed)
    given = sequences(lengths)
    part = forward.micro_batch(given, MicroBatchPlan.of(range(len(given))))
    found = forward.logprobs(packed, part)
    expected = []
    for sample in given:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        trained = torch.from_numpy(sample.loss_mask[1:])
        logits = alone(tokens, use_cache=False).logits[0, :-1][trained] / 0.7
        expected.append(logits.log_softmax(-1).gather(1, tokens[0, 1:][trained][:, None])[:, 0])
    for row, wanted in enumerate(expected):
        torch.testing.assert_close(found[row, : len(wanted)], wanted, rtol=1e-4, atol=1e-5)
        assert not found[row, len(wanted) :].any()
    assert part.mask.sum(-1).tolist() == [c for _, c in lengths]
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    (found * weights).sum().backward()
    torch.stack([(wanted * weights[row, : len(wanted)]).sum() for row, wanted in enumerate(expected)]).sum().backward()
    for (name, packed_parameter), alone_parameter in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if alone_parameter.grad is not None:
            torch.testing.assert_close(
                packed_parameter.grad, alone_parameter.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_linear_layers_see_no_padding_and_no_last_token() -> None:
    model = AutoModelForCausalLM.from_config(deepcopy(FAMILIES[0]))
    forward = Forward(torch.device("cpu"), torch.float32, 1.0)
    forward.prepare(model)
    seen: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, given, __, n=name: seen.__setitem__(n, given[0].shape[:-1].numel()))
    lengths = [(3, 9), (7, 2), (1, 1), (5, 12)]
    forward.logprobs(model, forward.micro_batch(sequences(lengths), MicroBatchPlan.of(range(4))))
    assert "lm_head" not in seen  # its logits are computed chunk by chunk of the trained tokens
    assert set(seen.values()) == {sum(p + c - 1 for p, c in lengths)}


HEADS = [
    Gemma2Config(**SHAPE, final_logit_softcapping=0.5, attn_logit_softcapping=None),
    CohereConfig(**SHAPE, logit_scale=0.25),
    GraniteConfig(**SHAPE, logits_scaling=3.0),
    PhiConfig(**{name: value for name, value in SHAPE.items() if name != "head_dim"}),  # its head has a bias
]


@pytest.mark.parametrize("config", HEADS, ids=lambda c: c.model_type)
def test_log_probs_are_those_of_the_models_own_logits_with_scale_softcap_and_bias(config: PreTrainedConfig) -> None:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(deepcopy(config))
    with torch.no_grad():
        bias = model.get_output_embeddings().bias
        if bias is not None:
            bias.normal_()
    (sample,) = sequences([(3, 9)])
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    expected = model.eval()(tokens, use_cache=False).logits[0, 2:-1].log_softmax(-1).gather(-1, tokens[0, 3:, None])
    forward = Forward(torch.device("cpu"), torch.float32, 1.0)
    found = forward.logprobs(forward.prepare(model), forward.micro_batch([sample], MicroBatchPlan.of([0])))
    torch.testing.assert_close(found[0], expected[:, 0], rtol=1e-4, atol=1e-5)


class DoubledLogits(Qwen3ForCausalLM):
    """A model that changes its logits by a rule that no setting names."""

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        output = super().forward(*arguments, **settings)
        output.logits = 2 * output.logits
        return output


def test_model_whose_logits_follow_from_its_head_in_an_unknown_way_is_refused() -> None:
    forward = Forward(torch.device("cpu"), torch.float32, 1.0)
    with pytest.raises(ConfigError, match=r"DoubledLogits cannot be trained.*logits do not follow.*another model"):
        forward.prepare(DoubledLogits(deepcopy(FAMILIES[0])))


def test_pack_inverts_unpack() -> None:
    for lengths in ([3, 1, 4], [2, 2]):
        packing = Packing.of(lengths, torch.device("cpu"))
        (rows,) = packing.calls
        packed = torch.randn(sum(lengths), 2, 5)
        unpacked = rows.unpack(packed)
        assert unpacked.shape == (len(lengths), 2, max(lengths), 5)
        assert torch.equal(rows.pack(unpacked.transpose(1, 2)), packed)
        assert packing.positions.tolist() == [[i for length in lengths for i in range(length)]]
