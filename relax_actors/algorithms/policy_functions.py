"""Policy loss and correction of a run, with their settings from [algorithm].

What a user's function returns is checked at every call, because a wrong shape would broadcast and a nan would end in
the weights.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.corrections import CorrectionKind, TokenWeights, correction_weights
from relax_actors.algorithms.named_functions import call_user_function, load_correction, load_policy_loss
from relax_actors.algorithms.own_options import arguments_of, settings_of
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import loss_spec
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import CORRECTIONS, POLICY_LOSSES

Array = NDArray[Any]


class PolicyFunctions:
    """Policy loss and off-policy correction of a run, with their settings bound.

    Attributes:
        spec: facts of the policy loss.
        has_own_loss: whether the policy loss is a function of the user or of another package.
        has_own_correction: whether the off-policy correction is.

    Raises:
        ConfigError: a function does not import or is not callable, or an option of it is missing or of the wrong type.
    """

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._surrogate = load_policy_loss(algorithm.surrogate)
        self.spec = loss_spec(self._surrogate)
        self._settings = arguments_of(self._surrogate, algorithm)
        self._correction = load_correction(algorithm.correction.kind)
        self.has_own_loss = algorithm.surrogate not in POLICY_LOSSES.built_in
        self.has_own_correction = algorithm.correction.kind not in CORRECTIONS.built_in
        self._correction_settings = arguments_of(self._correction, algorithm) if self.has_own_correction else {}

    @property
    def needs_sample_sums(self) -> bool:
        """Whether the policy loss may read sums over samples."""
        return self.has_own_loss or bool(self.spec.over_sample)

    def choose(self, advantages: Array, logprobs: Array, ratio: Array, *, seed: int) -> Array:
        """Choose tokens of the step by `LossSpec.choose`, `[tokens] bool`.

        Raises:
            ConfigError: the user's function raised an exception, or returned no bool for each token.
            ValueError: the policy loss chooses no tokens.
        """
        if (function := self.spec.choose) is None:
            msg = f"algorithm.surrogate = {self._algorithm.surrogate!r} chooses no tokens of the step"
            raise ValueError(msg)
        given = {"advantages": advantages, "logprobs": logprobs, "ratio": ratio, "seed": seed}
        given |= settings_of(function, self._algorithm)
        names = inspect.signature(function).parameters
        arguments = {name: given[name] for name in names if name in given}
        if not self.has_own_loss:
            return cast("Array", function(**arguments))
        source = f"algorithm.surrogate = {self._algorithm.surrogate!r}: choose"
        return checked_choice(call_user_function(function, source, **arguments), len(advantages), source)

    def policy_loss(self, inputs: PolicyInputs) -> PolicyLoss:
        """Compute the policy loss of each token.

        Raises:
            ConfigError: the user's function returned no tensor, a wrong shape, no gradient, or a number that is not
                finite.
        """
        source = f"algorithm.surrogate = {self._algorithm.surrogate!r}"
        if self.has_own_loss:
            result = call_user_function(self._surrogate, source, inputs, **self._settings)
        else:
            result = self._surrogate(inputs, **self._settings)
        if isinstance(result, Tensor):
            ratio = inputs.log_ratio.detach().exp()
            result = PolicyLoss(result, torch.zeros_like(inputs.mask), ratio)
        if self.has_own_loss:
            loss = checked_loss(result, inputs.mask, source)
            if torch.is_grad_enabled() and not loss.requires_grad:
                msg = f"{source} returned a loss without gradient; compute it from inputs.logprobs or inputs.ratio"
                raise ConfigError(msg)
        return cast("PolicyLoss", result)

    def weights(self, near: Tensor, rollout: Tensor, mask: Tensor) -> TokenWeights:
        """Compute the weights of the off-policy correction.

        Args:
            near: `[batch, seq] float32`, log-probs of the numerator.
            rollout: `[batch, seq] float32`, log-probs that the tokens were sampled with.
            mask: `[batch, seq] bool`, tokens that count.

        Raises:
            ConfigError: the user's function returned no tensor, a wrong shape, or a number that is not finite.
        """
        settings = self._algorithm.correction
        if settings.kind in CORRECTIONS.built_in:
            kind, low, high = cast("CorrectionKind", settings.kind), settings.low, settings.high
            return correction_weights(near, rollout, mask, kind=kind, level=settings.level, low=low, high=high)
        source = f"algorithm.correction.kind = {settings.kind!r}"
        arguments = near.detach(), rollout.detach(), mask
        result = call_user_function(self._correction, source, *arguments, **self._correction_settings)
        weights = checked(result, mask, source).detach()
        return TokenWeights(weights, torch.zeros_like(mask))


def checked_loss(result: object, mask: Tensor, source: str) -> Tensor:
    """Return a user's loss of each token; raises ConfigError if unusable.

    `mask` `[batch, seq] bool` has the tokens that count.

    Raises:
        ConfigError: as `checked`, or `clipped` or `ratio` of a `PolicyLoss` do not fit the tokens.
    """
    if not isinstance(result, PolicyLoss):
        return checked(result, mask, source)
    for name, part in (("clipped", result.clipped), ("ratio", result.ratio)):
        is_fit = (
            isinstance(part, Tensor) and part.shape == mask.shape and (part.dtype == torch.bool) == (name != "ratio")
        )
        if not is_fit:
            what = f"{part.dtype}{_shape(part)}" if isinstance(part, Tensor) else type(part).__name__
            needed = "bool" if name == "clipped" else "float32"
            msg = f"{source} returned a PolicyLoss with {name} {what}; give one {needed} for each token, {_shape(mask)}"
            raise ConfigError(msg)
    return checked(result.loss, mask, source)


def checked_choice(chosen: object, tokens: int, source: str) -> Array:
    """Return a user's choice of tokens, `[tokens] bool`; raises ConfigError."""
    if not isinstance(chosen, np.ndarray) or chosen.shape != (tokens,) or chosen.dtype != bool:
        what = f"{chosen.dtype}{list(chosen.shape)}" if isinstance(chosen, np.ndarray) else type(chosen).__name__
        msg = f"{source} returned {what}; return a NumPy array of one bool for each token, [{tokens}]"
        raise ConfigError(msg)
    return chosen


def checked(values: object, mask: Tensor, source: str) -> Tensor:
    """Return a user's number for each token; `mask` is `[batch, seq] bool`.

    Raises:
        ConfigError: it is no tensor of the mask's shape, or a number of a trained token is not finite.
    """
    if not isinstance(values, Tensor):
        msg = f"{source} returned {type(values).__name__}; return a tensor of one value for each token, {_shape(mask)}"
        raise ConfigError(msg)
    if values.shape != mask.shape:
        msg = (
            f"{source} returned shape {_shape(values)} for tokens of shape {_shape(mask)}; return one value for each "
            "token"
        )
        raise ConfigError(msg)
    wrong = ~values.detach().isfinite() & mask
    if wrong.any():
        figure = float(values.detach()[wrong][0])
        msg = (
            f"{source} returned {figure} for {int(wrong.sum())} of {int(mask.sum())} tokens of a micro-batch; bound "
            "logarithms, divisions and exponentials, e.g. log_ratio.clamp(-20, 20)"
        )
        raise ConfigError(msg)
    return values


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
