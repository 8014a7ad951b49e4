"""Every built-in implementation of a protocol has a class in this folder that runs the suite of the protocol."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from relax_actors.monitoring.sinks import SINKS
from relax_actors.registry.catalog import (
    CRITIC_ENGINES,
    DATA_SOURCES,
    INFERENCE_ENGINES,
    TRAINING_ENGINES,
    WEIGHT_TRANSPORTS,
)

SUITES = {
    "inference engine": (INFERENCE_ENGINES, {"InferenceEngineConformance", "LanguageModelConformance"}),
    "training engine": (TRAINING_ENGINES, {"TrainingEngineConformance", "GradientConformance"}),
    "critic engine": (CRITIC_ENGINES, {"CriticConformance"}),
    "weight transport": (WEIGHT_TRANSPORTS, {"WeightTransportConformance"}),
    "data source": (DATA_SOURCES, {"DataSourceConformance"}),
    "sink": (SINKS, {"MonitorSinkConformance"}),
}


def implemented(suites: set[str]) -> set[str]:
    """Values of `implements` of all classes that subclass a suite; read, since modules may need missing packages."""
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or suites.isdisjoint(ast.unparse(base) for base in node.bases):
                continue
            found |= {
                ast.literal_eval(line.value)
                for line in node.body
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "implements"
            }
    return found


@pytest.mark.parametrize("kind", SUITES)
def test_every_built_in_implementation_runs_its_suite(kind: str) -> None:
    registry, suites = SUITES[kind]
    assert implemented(suites) == set(registry.built_in)
