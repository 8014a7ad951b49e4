"""Policy losses against the papers' equations worked by hand, and by the check that users run on their own losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_actors.algorithms.named_functions import check_user_functions
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss, RatioLevel, Totals
from relax_actors.algorithms.policy_functions import PolicyFunctions
from relax_actors.algorithms.specs import LossSpec
from relax_actors.algorithms.surrogates.clipped import clip, clip_weight
from relax_actors.algorithms.surrogates.covariance import choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from relax_actors.algorithms.surrogates.smooth import gamma, gate, geometric
from relax_actors.algorithms.surrogates.weighted import divergence_mask, p3o, score
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import POLICY_LOSSES
from relax_actors.testing import check_policy_loss

LEVELS: tuple[RatioLevel, ...] = ("token", "sequence_mean", "sequence_product", "none")


def inputs_of(new: list[float], old: list[float], advantages: list[float], **others: object) -> PolicyInputs:
    """Build the inputs of one sequence from probabilities, float64."""
    values = [torch.tensor([row], dtype=torch.float64) for row in (new, old, advantages)]
    mask = torch.ones(1, len(new), dtype=torch.bool)
    return PolicyInputs.of(values[0].log().requires_grad_(), values[1].log(), values[2], mask, **others)


def loss_and_gradient(found: PolicyLoss, inputs: PolicyInputs) -> tuple[list[float], list[float]]:
    """Loss of each token, and the gradient of the sum with respect to its log-prob."""
    (gradient,) = torch.autograd.grad(found.loss.sum(), inputs.logprobs)
    return found.loss[0].tolist(), gradient[0].tolist()


@pytest.mark.parametrize("name", POLICY_LOSSES.built_in)
def test_built_in_losses_pass_the_check_of_users(name: str) -> None:
    function = POLICY_LOSSES.load(name, "test")
    for level in LEVELS:
        check_policy_loss(function, ratio=level)
    if name == "clip":
        check_policy_loss(clip, dual_clip=3.0)
    if name == "divergence_mask":
        check_policy_loss(divergence_mask, divergence="kl", ratio_cap=2.0)


def test_gspo_uses_the_geometric_mean_of_the_ratios() -> None:
    # Ratios 1.5 and 0.6: s = sqrt(0.9). A gradient of s A / 2 at each token makes the mean of the sample that of s.
    inputs = inputs_of([0.3, 0.3], [0.2, 0.5], [2.0, 2.0], level="sequence_mean")
    s = math.sqrt(0.9)
    loss, gradient = loss_and_gradient(clip(inputs, clip_low=0.2, clip_high=0.2), inputs)
    assert loss == pytest.approx([-2 * s, -2 * s])
    assert gradient == pytest.approx([-2 * s, -2 * s])
    near = clip(inputs, clip_low=3e-4, clip_high=4e-4)
    assert near.loss[0].tolist() == pytest.approx([-2 * s, -2 * s])  # below 1 - low, but A > 0
    assert not near.clipped.any()


def test_product_ratio_is_that_of_the_whole_sample() -> None:
    inputs = inputs_of([0.3, 0.3], [0.2, 0.5], [1.0, 1.0], level="sequence_product")
    found = clip(inputs, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(found.loss.mean(), inputs.logprobs)
    assert found.loss[0].tolist() == pytest.approx([-0.9, -0.9])
    assert gradient[0].tolist() == pytest.approx([-0.9, -0.9])  # d(-s)/d logprob = -s at every token


def test_sequences_of_a_sample_share_its_ratio() -> None:
    # The other sequence of the sample has 2 tokens and a sum of log-ratios of -log(3).
    totals = Totals(samples={"log_ratio": torch.tensor([math.log(1.5) - math.log(3)], dtype=torch.float64)})
    counts = torch.tensor([3])
    inputs = inputs_of([0.3], [0.2], [1.0], level="sequence_mean", totals=totals, sample_tokens=counts)
    assert clip(inputs).ratio.item() == pytest.approx(0.5 ** (1 / 3))


def test_cispo_weighs_the_score_by_the_clipped_ratio() -> None:
    inputs = inputs_of([0.6, 0.1], [0.1, 0.5], [1.0, -1.0])  # ratios 6 and 0.2
    found = clip_weight(inputs, clip_low=1.0, clip_high=4.0)
    loss, gradient = loss_and_gradient(found, inputs)
    assert loss == pytest.approx([-5 * math.log(0.6), 0.2 * math.log(0.1)])
    assert gradient == pytest.approx([-5.0, 0.2])
    assert found.clipped.tolist() == [[True, False]]


def test_sapo_gates_the_ratio_by_a_sigmoid() -> None:
    inputs = inputs_of([0.2, 0.4], [0.2, 0.2], [1.0, -1.0])  # ratios 1 and 2
    loss, gradient = loss_and_gradient(gate(inputs, tau_pos=1.0, tau_neg=1.05), inputs)
    sigmoid = 1 / (1 + math.exp(-1.05))
    assert loss == pytest.approx([-2.0, 4 / 1.05 * sigmoid])
    assert gradient == pytest.approx([-1.0, 4 * sigmoid * (1 - sigmoid) * 2])


def test_vespo_weighs_the_sample_by_phi_of_its_ratio() -> None:
    inputs = inputs_of([0.4, 0.4], [0.2, 0.5], [1.0, 1.0])  # w = 2 * 0.8
    phi = math.exp(3) * 1.6**2 * math.exp(-3 * 1.6)
    _, gradient = loss_and_gradient(gamma(inputs), inputs)
    assert gradient == pytest.approx([-phi, -phi])
    corrected = inputs_of([0.4, 0.4], [0.2, 0.5], [-1.0, -1.0], weights=torch.tensor([[0.5, 1.0]]).double())
    phi = math.exp(2) * 0.8**3 * math.exp(-2 * 0.8)
    assert loss_and_gradient(gamma(corrected), corrected)[1] == pytest.approx([phi, phi])
    equal = inputs_of([0.4], [0.4], [1.0])
    assert loss_and_gradient(gamma(equal), equal)[1] == pytest.approx([-1.0])


def test_gmpo_takes_the_geometric_mean_of_one_sidedly_clipped_ratios() -> None:
    # Log-ratios log(2) and log(0.5), A > 0: the first is clipped at 0.4, the second is below the bound that counts.
    inputs = inputs_of([0.4, 0.2], [0.2, 0.4], [1.0, 1.0])
    found = geometric(inputs, clip_low=0.4, clip_high=0.4)
    ratio = math.exp((0.4 + math.log(0.5)) / 2)
    loss, gradient = loss_and_gradient(found, inputs)
    assert loss == pytest.approx([-ratio, -ratio])
    assert gradient == pytest.approx([0.0, -ratio])
    assert found.clipped.tolist() == [[True, False]]
    negative = inputs_of([0.4, 0.2], [0.2, 0.4], [-1.0, -1.0])
    assert loss_and_gradient(geometric(negative), negative)[1] == pytest.approx([math.exp((math.log(2) - 0.4) / 2), 0])


def test_dppo_drops_tokens_whose_probability_moved_too_far() -> None:
    new, old = [0.5, 0.5, 0.1, 0.5], [0.2, 0.2, 0.4, 0.4]
    inputs = inputs_of(new, old, [1.0, -1.0, -1.0, 1.0])
    found = divergence_mask(inputs, clip_low=0.2, clip_high=0.2, ratio_cap=2.0)
    # Up by 0.3 with A > 0: dropped. Up with A < 0: kept, weight 2.5 capped at 2. Down by 0.3 with A < 0: dropped.
    assert found.clipped.tolist() == [[True, False, True, False]]
    assert loss_and_gradient(found, inputs)[1] == pytest.approx([0, 2.0, 0, -1.25])
    kl = [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for p, q in zip(new, old, strict=True)]
    bound = (kl[3] + kl[0]) / 2
    by_kl = divergence_mask(inputs, divergence="kl", clip_low=bound, clip_high=bound)
    assert by_kl.clipped.tolist() == [[True, False, True, False]]


def test_score_has_no_ratio() -> None:
    inputs = inputs_of([0.5, 0.2], [0.1, 0.2], [2.0, -1.0])
    loss, gradient = loss_and_gradient(score(inputs), inputs)
    assert loss == pytest.approx([-2 * math.log(0.5), math.log(0.2)])
    assert gradient == [-2.0, 1.0]


def test_p3o_caps_the_ratio_at_the_effective_sample_size() -> None:
    # Ratios 1, 2, 0.5 and 4 to the rollout: e = 7.5^2 / (4 * 21.25).
    base = 0.1
    inputs = inputs_of([base, 2 * base, base / 2, 4 * base], [base] * 4, [1.0, -1.0, 2.0, -0.5])
    e = 7.5**2 / (4 * 21.25)
    _, gradient = loss_and_gradient(p3o(inputs), inputs)
    kl = [(1 - e) * (1 - 1 / ratio) for ratio in (1, 2, 0.5, 4)]
    assert gradient == pytest.approx([-e + kl[0], e + kl[1], -1.0 + kl[2], 0.5 * e + kl[3]])


def test_clip_cov_chooses_among_tokens_of_large_covariance_by_the_seed() -> None:
    random = np.random.default_rng(0)
    advantages, logprobs = random.normal(size=1000), random.normal(size=1000)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "covariance_share": 0.01, "covariance_bounds": (1.0, 5.0)}
    ratio = np.ones(1000)
    chosen = choose_clip_cov(advantages, logprobs, ratio, **bounds, seed=3)
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    assert chosen.sum() == 10
    assert (covariance[chosen] > 1).all()
    assert np.array_equal(chosen, choose_clip_cov(advantages, logprobs, ratio, **bounds, seed=3))
    assert not np.array_equal(chosen, choose_clip_cov(advantages, logprobs, ratio, **bounds, seed=4))
    stopped = choose_clip_cov(advantages, logprobs, np.where(advantages > 0, 2.0, 0.1), **bounds, seed=3)
    assert not stopped.any()
    inputs = inputs_of([0.2, 0.2], [0.2, 0.2], [1.0, 1.0], selected=torch.tensor([[True, False]]))
    assert loss_and_gradient(clip_cov(inputs), inputs) == ([0.0, -1.0], [0.0, -1.0])


def test_kl_cov_penalises_the_tokens_of_largest_covariance() -> None:
    chosen = choose_kl_cov(np.array([1.0, -1.0, 2.0, 0.0]), np.array([-1.0, -3.0, -1.0, -2.0]), covariance_share=0.3)
    assert chosen.tolist() == [False, False, True, False] or chosen.tolist() == [False, True, False, False]
    inputs = inputs_of([0.4, 0.1], [0.2, 0.2], [1.0, 1.0], selected=torch.tensor([[True, True]]))
    loss, gradient = loss_and_gradient(kl_cov(inputs, covariance_coefficient=0.1), inputs)
    assert loss == pytest.approx([-2 + 0.1 * math.log(2), -0.5 + 0.1 * math.log(2)])
    assert gradient == pytest.approx([-2 + 0.1, -0.5 - 0.1])
    missing = inputs_of([0.4], [0.2], [1.0])
    with pytest.raises(ValueError, match="tokens that the covariance selects are missing"):
        kl_cov(missing)


def of_the_micro_batch(inputs: PolicyInputs) -> Tensor:
    """Subtract a mean over the micro-batch: depends on the cut."""
    return -(inputs.advantages - inputs.advantages[inputs.mask].mean()) * inputs.ratio


def with_wrong_gradient(inputs: PolicyInputs) -> Tensor:
    """Return a value whose gradient is another one."""
    return -inputs.advantages * inputs.logprobs + (inputs.ratio.data - inputs.ratio) * inputs.ratio.data


def with_own_option(inputs: PolicyInputs, *, mine: float) -> Tensor:
    return inputs.ratio * inputs.advantages * mine


def of_the_step_unmarked(inputs: PolicyInputs) -> Tensor:
    return -inputs.ratio * inputs.step_sum("tokens", torch.ones_like(inputs.ratio))


@LossSpec(whole_step=True)
def of_the_step(inputs: PolicyInputs, *, clip_high: float) -> Tensor:
    """Scale by the mean advantage of the step, and read a setting."""
    total = inputs.step_sum("advantages", inputs.advantages) / inputs.step_sum("tokens", torch.ones_like(inputs.ratio))
    return -(inputs.advantages - total) * inputs.ratio.clamp(max=1 + clip_high)


def test_check_passes_a_loss_that_reads_the_whole_step() -> None:
    check_policy_loss(of_the_step, clip_high=0.3)


def test_check_names_what_is_wrong_with_a_loss() -> None:
    with pytest.raises(
        AssertionError, match=r"of_the_micro_batch: the loss of a step differs by .* between 1 and 6 micro"
    ):
        check_policy_loss(of_the_micro_batch)
    with pytest.raises(AssertionError, match=r"token 0 of sequence 0 .*finite differences"):
        check_policy_loss(with_wrong_gradient)
    with pytest.raises(ValueError, match=r"step_sum\('tokens'\) needs the whole step"):
        check_policy_loss(of_the_step_unmarked)
    with pytest.raises(ConfigError, match=r"<lambda> returned shape \[\] for tokens of shape \[6, 9\]"):
        check_policy_loss(lambda inputs: inputs.ratio.sum())
    with pytest.raises(ConfigError, match=r"<lambda> returned nan for \d+ of 22 tokens"):
        check_policy_loss(lambda inputs: inputs.ratio.log() / inputs.ratio.log())
    with pytest.raises(ConfigError, match=r"algorithm\.options\.mine: is missing; with_own_option has no default"):
        check_policy_loss(with_own_option)
    with pytest.raises(ConfigError, match=r"algorithm\.options\.mine: .*number, got 'much'"):
        check_policy_loss(with_own_option, mine="much")


def test_check_passes_options() -> None:
    check_policy_loss(with_own_option, mine=2.0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("of_samples", r"returned shape \[1\] for tokens of shape \[1, 2\]; return one value for each token$"),
        (
            "not_a_number",
            r"returned nan for 2 of 2 tokens of a micro-batch; bound logarithms, divisions and exponentials",
        ),
        ("without_gradient", r"returned a loss without gradient; compute it from inputs.logprobs or inputs.ratio$"),
        ("failing", r"raised LookupError: no such baseline \(.*wrong_losses.py, line \d+\); fix the function$"),
    ],
)
def test_what_a_user_returns_is_checked(name: str, error: str) -> None:
    path = f"tests.support.wrong_losses.{name}"
    functions = PolicyFunctions(AlgorithmSection.model_validate({"surrogate": path}))
    with pytest.raises(ConfigError, match=f"^algorithm.surrogate = '{path}' {error}"):
        functions.policy_loss(inputs_of([0.5, 0.2], [0.4, 0.2], [1.0, 1.0]))


def test_correction_of_the_user_gives_the_weights() -> None:
    path = "tests.support.wrong_losses.weights"
    functions = PolicyFunctions(AlgorithmSection.model_validate({"correction": {"kind": path}}))
    inputs = inputs_of([0.5, 0.2], [0.4, 0.4], [1.0, 1.0])
    found = functions.weights(inputs.logprobs, inputs.proximal, inputs.mask).weight
    assert found[0].tolist() == pytest.approx([1.0, 0.5])
    assert not found.requires_grad


def test_functions_of_the_user_are_checked_before_a_run_starts() -> None:
    of_user = "tests.support.wrong_losses"
    with pytest.raises(ConfigError, match=r"^algorithm.options.strength: is missing; with_own_setting has no default"):
        check_user_functions(AlgorithmSection.model_validate({"surrogate": f"{of_user}.with_own_setting"}))
    with pytest.raises(ConfigError, match="has no 'weight'; did you mean weights"):
        check_user_functions(AlgorithmSection.model_validate({"correction": {"kind": f"{of_user}.weight"}}))
    with pytest.raises(ConfigError, match=r"^algorithm\.surrogate = 'math\.pi' is a float"):
        check_user_functions(AlgorithmSection.model_validate({"surrogate": "math.pi"}))


def test_invalid_bounds_are_refused_with_the_remedy() -> None:
    inputs = inputs_of([0.5], [0.4], [1.0])
    with pytest.raises(ValueError, match=r"clip_low is 1\.5 and clip_high is 4\.0"):
        clip_weight(inputs, clip_low=1.5)
    with pytest.raises(ValueError, match=r"tau_pos is 0\.0 and tau_neg is 1\.05"):
        gate(inputs, tau_pos=0.0)
    with pytest.raises(ValueError, match=r"clip_low is -1\.0 and clip_high is 0\.4"):
        geometric(inputs, clip_low=-1.0)
