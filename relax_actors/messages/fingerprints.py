"""Fingerprints of the weights that sampled the tokens of a trajectory, one for each version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def sampling_versions(versions: Array) -> list[int]:
    """Versions that sampled tokens, in ascending order.

    Args:
        versions: `[total]` integers, -1 where no policy sampled the token.
    """
    if len(versions) and versions[0] >= 0 and (versions == versions[0]).all():
        return [int(versions[0])]
    found: list[int] = np.unique(versions[versions >= 0]).tolist()
    return found


def fingerprints_of(versions: Array, known: Mapping[int, str]) -> list[str]:
    """Fingerprints as a trajectory stores them.

    Args:
        versions: `[total]` integers, version that sampled each token, or -1.
        known: fingerprints by version; versions without one get an empty string.
    """
    found = [known.get(version, "") for version in sampling_versions(versions)]
    return found if any(found) else []
