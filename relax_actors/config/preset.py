"""A preset of [algorithm], and settings that several presets share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of an algorithm.

    Attributes:
        title: name of the algorithm.
        paper: arXiv number of its source, or the address of one that is no paper.
        figures: what its numbers follow, with section or equation of the source.
        settings: settings of [algorithm], nested as in TOML.
        note: what to know before it is used.
    """

    title: str
    paper: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    figures: str = ""

    @property
    def source(self) -> str:
        """Name of the source: `arXiv 2402.03300`, or its address."""
        return self.paper if self.paper.startswith("https://") else f"arXiv {self.paper}"

    @property
    def address(self) -> str:
        """Address of the source."""
        return self.paper if self.paper.startswith("https://") else f"https://arxiv.org/abs/{self.paper}"


CLIP: dict[str, Any] = {"ratio": "token", "surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2}
GROUP: dict[str, Any] = {"advantage": "group", "scale": "group_std"}
SCORE: dict[str, Any] = {"scale": "none", "ratio": "none", "surrogate": "score", "aggregate": "token_mean"}
EXAMPLES: dict[str, Any] = {"rows": "examples", "advantage": "none", "scale": "none", "ratio": "none"}
PAIRS: dict[str, Any] = {
    **EXAMPLES,
    "rows": "pairs",
    "surrogate": "preference",
    "aggregate": "sample_mean_of_sums",
}
TOKENS = {"aggregate": "token_mean"}
DPPO: dict[str, Any] = {"advantage": "group", "scale": "none", "ratio_cap": 1e4, "aggregate": "constant"}
SAMPLES = {"aggregate": "sample_mean_of_means"}
KL_IN_REWARD = {"kl": {"place": "reward", "kind": "k1"}}
ON_POLICY = "Each batch is trained once, by the weights that sampled it: `staleness.max = 0`, or a correction."
