"""A prefix that sequences share is computed once, with the log-probs and gradients of sequences that share nothing."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedConfig

from relax_actors.algorithms.shared_prefixes import LEAST_TOKENS, find_shared_prefixes
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.protocols.samples import input_lengths, plan_micro_batches
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.packing import Packing, attend_rows, cut_calls
from tests.unit.test_packing import FAMILIES

CPU = torch.device("cpu")


def tree(seed: int, *, rows: int = 3) -> list[TrainSample]:
    """Return the sequences of rows: samples of one prompt, some of which branch from another sample's completion."""
    source = np.random.default_rng(seed)

    def drawn(least: int, most: int) -> Any:
        return source.integers(0, 50, source.integers(least, most + 1), dtype=np.int32)

    found = []
    for row in range(rows):
        prompt = drawn(1, 30)
        completions = [drawn(1, 15) for _ in range(4)]
        branches = [np.concatenate([c[: source.integers(1, len(c) + 1)], drawn(1, 12)]) for c in completions[:2]]
        for sample, completion in enumerate([*completions, *branches, completions[3]]):
            whole = TrainSample.of_completion(prompt, completion, row=row, sample=sample)
            mask = whole.loss_mask & (source.random(len(whole)) < 0.8)
            mask[-1] = True
            found.append(TrainSample(whole.token_ids, mask, row=row, sample=sample))
    return [found[i] for i in source.permutation(len(found))]


def double(config: PreTrainedConfig) -> Any:
    """Build a model with random float64 weights."""
    model = AutoModelForCausalLM.from_config(deepcopy(config)).double()
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others have no kernel for float64
    return model


def scored(model: Any, samples: list[TrainSample], budget: int, *, shares: bool) -> tuple[list[Any], list[Any], int]:
    """Return the log-probs of each sequence, the gradients of their weighted sum, and the tokens computed."""
    forward = Forward(CPU, torch.float32, 0.7, share_prefixes=shares)
    forward.prepare(model)
    model.zero_grad()
    logprobs: dict[int, Any] = {}
    computed = 0
    for plan in forward.plan(samples, budget):
        batch = forward.micro_batch(samples, plan)
        found = forward.logprobs(model, batch)
        computed += batch.tokens.shape[1]
        for row, index in enumerate(plan.indices):
            own = found[row, : samples[index].trained]
            assert not found[row, samples[index].trained :].any()
            (own * torch.linspace(-1, 1, len(own)).add(index / 10)).sum().backward(retain_graph=True)
            logprobs[index] = own.detach()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logprobs[i] for i in range(len(samples))], gradients, computed


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize("budget", [60, 10_000])
def test_log_probs_and_gradients_are_those_of_sequences_that_share_nothing(
    config: PreTrainedConfig, budget: int
) -> None:
    torch.manual_seed(2)
    model = double(config)
    samples = tree(5)
    shared, gradients, computed = scored(model, samples, budget, shares=True)
    alone, expected, unshared = scored(model, samples, budget, shares=False)
    assert unshared == sum(input_lengths(samples))
    assert computed < 0.6 * unshared
    for found, wanted in zip(shared, alone, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_prefix_with_other_recorded_experts_is_not_shared() -> None:
    source = np.random.default_rng(0)
    prompt, completions = source.integers(0, 50, 12, dtype=np.int32), source.integers(0, 50, (3, 4), dtype=np.int32)
    experts = source.integers(0, 4, (15, 2, 2), dtype=np.int16)
    other = experts.copy()
    other[10:] = (other[10:] + 1) % 4
    samples = [
        TrainSample.of_completion(prompt, completion, routed_experts=chosen)
        for completion, chosen in zip(completions, (experts, experts, other), strict=True)
    ]
    (plan,) = plan_micro_batches(samples, 100, share_prefixes=True)
    assert sorted(plan.shared) == [0, 10, 12]
    torch.manual_seed(3)
    model = double(next(c for c in FAMILIES if c.model_type == "qwen3_moe"))
    routers = Routers(model)
    found = []
    for shares in (True, False):
        forward = Forward(CPU, torch.float32, 1.0, share_prefixes=shares)
        found.append(forward.score(forward.prepare(model), samples, 100, lambda: None, routers))
    for shared, alone in zip(*found, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-6)


SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12)


def common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(SEQUENCES)
def test_each_sequence_shares_as_much_with_its_predecessor_as_with_any_before_it(given_: list[list[int]]) -> None:
    order, shared = find_shared_prefixes([np.array(sequence, np.int32) for sequence in given_])
    assert sorted(order) == list(range(len(given_)))
    for place, i in enumerate(order):
        longest = max((common(given_[i], given_[j]) for j in order[:place]), default=0)
        assert shared[i] == (longest if longest >= LEAST_TOKENS else 0)


@given(SEQUENCES, st.integers(40, 120))
def test_micro_batches_fit_the_budget_with_each_shared_prefix_counted_once(
    given_: list[list[int]], budget: int
) -> None:
    samples = [
        TrainSample(np.array(tokens, np.int32), np.arange(len(tokens)) > len(tokens) // 2, row=len(tokens) % 2)
        for tokens in given_
    ]
    plans = plan_micro_batches(samples, budget, share_prefixes=True)
    assert sorted(i for plan in plans for i in plan.indices) == list(range(len(samples)))
    for plan in plans:
        read = [samples[i].inputs for i in plan.indices]
        packing = Packing.of(read, CPU, plan.shared)
        assert packing.positions.shape[1] <= budget
        assert sum(samples[i].trained for i in plan.indices) <= budget
        own = zip(plan.indices, plan.shared, read, strict=True)
        tokens = np.concatenate([samples[i].token_ids[n:length] for i, n, length in own])
        for i, path in zip(plan.indices, packing.paths, strict=True):
            assert tokens[path].tolist() == samples[i].token_ids[: samples[i].inputs].tolist()
            assert packing.positions[0, path].tolist() == list(range(samples[i].inputs))
        for before, after, n in zip(plan.indices, plan.indices[1:], plan.shared[1:], strict=False):
            assert n == 0 or samples[before].row == samples[after].row


def test_model_reads_up_to_the_token_before_the_last_trained_one() -> None:
    ids = np.arange(9, dtype=np.int32)
    for trained, inputs in (([8], 8), ([3, 5], 5), ([1], 1), ([], 1)):
        assert TrainSample(ids, np.isin(np.arange(9), trained)).inputs == inputs


def test_equal_prompts_with_one_token_each_are_read_once() -> None:
    samples = [TrainSample.of_completion(np.arange(6), np.array([n])) for n in range(5)]
    (plan,) = plan_micro_batches(samples, 100, share_prefixes=True)
    assert plan.shared == [0, 6, 6, 6, 6]


def test_sequences_that_share_nothing_are_planned_longest_first() -> None:
    samples = [TrainSample.of_completion(np.array([n]), np.arange(length), row=0) for n, length in enumerate((3, 9, 5))]
    (plan,) = plan_micro_batches(samples, 100, share_prefixes=True)
    assert plan.indices == [1, 2, 0]
    assert plan.shared == [0, 0, 0]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=30))
def test_padding_of_attention_calls_costs_less_than_further_calls(shapes: list[tuple[int, int]]) -> None:
    shapes = [(min(pair), max(pair)) for pair in shapes]
    groups = cut_calls(shapes)
    assert sorted(i for group in groups for i in group) == list(range(len(shapes)))
    padded = sum(len(g) * max(shapes[i][0] for i in g) * max(shapes[i][1] for i in g) for g in groups)
    assert padded <= 4 * sum(q * k for q, k in shapes) + (1 << 14) * len(shapes)


@given(SEQUENCES, st.integers(0, 3))
def test_lengths_for_a_varlen_kernel_describe_the_attention_of_the_rows(given_: list[list[int]], padding: int) -> None:
    # The kernel of CUDA gets the own tokens of each sequence as queries and aligns the causal mask at the last token.
    order, shared = find_shared_prefixes([np.array(sequence, np.int32) for sequence in given_])
    lengths, prefixes = [len(given_[i]) for i in order], [shared[i] for i in order]
    extra = [padding] if padding else []
    packing = Packing.of([*lengths, *extra], CPU, [*prefixes, *(0 for _ in extra)])
    torch.manual_seed(0)
    total = packing.positions.shape[1]
    query, key, value = (torch.randn(total, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    rows = packing.attend(query, key, value)
    keys = (key, value) if packing.keys is None else (key[packing.keys], value[packing.keys])
    expected = []
    for (begin, end), (first, last) in zip(pairwise(packing.ends), pairwise(packing.key_ends), strict=True):
        own, of = end - begin, last - first
        assert own <= of <= packing.longest
        if own:
            mask = torch.ones(own, of, dtype=torch.bool).tril(of - own)
            inputs = [tensor.transpose(0, 1)[None] for tensor in (query[begin:end], *(t[first:last] for t in keys))]
            expected.append(attend_rows(inputs[0], inputs[1], inputs[2], mask, None)[0])
    torch.testing.assert_close(rows, torch.cat(expected))
