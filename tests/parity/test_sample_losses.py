"""GMPO and the product ratio of RLOO against the trainers of TRL that compute them, to 1e-6 in float64.

Differences on purpose, each with its test:

- An empty sample does not count here and has no loss; TRL counts it, and GMPO gives it the loss -A.
- With `entropy.quantile`, a token that is left out has neither loss nor gradient here. GMPO leaves it out of the ratio,
  as TRL does; a sample without any other token has no loss here, and the loss -A without gradient in TRL. The ratio of
  GSPO is that of all tokens, and TRL trains the token through the loss of the other tokens.
- The log of a sample's ratio is clamped to +-20 here; TRL does not clamp.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.test_policy_losses import (
    KL,
    MEANS,
    assert_equal,
    entropy_mask,
    our_loss,
    step_of,
    trl_loss,
    trl_trainer,
)
from tests.parity.trl_source import function, require_trl

require_trl()
gmpo_loss = function("experimental/gmpo/gmpo_trainer.py", "_compute_loss", nanmin=torch.min, nanmax=torch.max)
rloo_loss = function("trainer/rloo_trainer.py", "_compute_loss", nanmin=torch.min, nanmax=torch.max)
GMPO = MEANS | {"surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.4}
PRODUCT = MEANS | {"ratio": "sequence_product"}


def gmpo(step: dict[str, Tensor], **settings: Any) -> tuple[float, Tensor]:
    return trl_loss(step, compute=gmpo_loss, epsilon_low=0.4, epsilon_high=0.4, **settings)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.2, 0.7])
def test_loss_and_gradient_are_those_of_trl(seed: int, spread: float) -> None:
    step = step_of(seed, spread=spread)
    assert_equal(our_loss(step, **GMPO), gmpo(step))
    assert_equal(our_loss(step, **GMPO, kl=KL), gmpo(step, beta=0.1))
    ours, theirs = our_loss(step, **PRODUCT), trl_loss(step, compute=rloo_loss)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


def test_empty_sample_has_no_loss_where_that_of_trl_is_minus_its_advantage() -> None:
    step = step_of(5, empty=True)
    empty = float(step["advantages"][2])
    loss, gradient = our_loss(step, **GMPO)
    assert_equal((loss * 5 / 6 - empty / 6, gradient * 5 / 6), gmpo(step))
    loss, gradient = our_loss(step, **PRODUCT)
    assert_equal((loss * 5 / 6 - empty / 6, gradient * 5 / 6), trl_loss(step, compute=rloo_loss))


def test_product_ratio_beyond_e20_is_clamped_where_that_of_trl_explodes() -> None:
    step = step_of(7, spread=0.1)
    step["new"][1, 0], step["advantages"][1] = step["old"][1, 0] + 25, -1.0
    loss, their_loss = our_loss(step, **PRODUCT)[0], trl_loss(step, compute=rloo_loss)[0]
    assert their_loss - loss == pytest.approx((math.exp(25) - math.exp(20)) / 6)


def test_token_that_entropy_leaves_out_is_left_out_of_the_ratio_as_in_gmpo_of_trl() -> None:
    step, q = step_of(0), 0.47
    kept = entropy_mask(trl_trainer(), step["entropies"], step["mask"], 1 - q).bool()
    loss, gradient = our_loss(step, **GMPO, entropy={"quantile": q})
    their_loss, their_gradient = gmpo(step, top_entropy_quantile=q)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-6, atol=1e-6)
    # A sample of which no token is left has no loss here.
    emptied = ~kept.any(-1)
    assert emptied.any()
    assert loss == pytest.approx(their_loss + float(step["advantages"][emptied].sum()) / len(kept), rel=1e-6)


def test_token_that_entropy_leaves_out_is_not_trained_where_gspo_of_trl_trains_it() -> None:
    step, settings = step_of(0), MEANS | {"ratio": "sequence_mean"}
    kept = entropy_mask(trl_trainer(), step["entropies"], step["mask"], 0.5)
    share = kept.sum(-1, keepdim=True) / step["mask"].sum(-1, keepdim=True)
    whole = our_loss(step, **settings)[1]
    loss, gradient = our_loss(step, **settings, entropy={"quantile": 0.5})
    torch.testing.assert_close(gradient, whole * kept, rtol=1e-12, atol=1e-15)
    of_trl = trl_loss(step, importance_sampling_level="sequence", loss_type="grpo", top_entropy_quantile=0.5)
    assert_equal((loss, whole * share), of_trl)
