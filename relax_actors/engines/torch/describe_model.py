"""What the installed transformers says of a config.json; asked in a process of its own, since its import takes seconds.

`python -m relax_actors.engines.torch.describe_model` reads a config.json from its standard input, builds the model's
configuration, and writes a `Description` as a line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from relax_actors.errors import ConfigError

SECONDS = 300.0
"""Deadline of an answer: a busy machine imports transformers for a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Names that transformers knows, and what it says of one configuration.

    Attributes:
        classes: class that generates, by model type.
        value_heads: model types that can have a value head, or one for the scores of steps.
        score_heads: model types that can have a head for the scores of answers.
        activations: names of activations.
        ropes: names of scalings of rotary positions.
        has_rope: whether the model has rotary positions.
        has_layers: whether the model names its layers, so that they are recomputed or shared one by one.
        error: why the configuration cannot be built; empty if it can, or if its type is unknown.
    """

    classes: Mapping[str, str]
    value_heads: Sequence[str]
    score_heads: Sequence[str]
    activations: Sequence[str]
    ropes: Sequence[str]
    has_rope: bool = True
    has_layers: bool = True
    error: str = ""


@cache
def describe(body: str) -> Description:
    """Describe a config.json; raises ConfigError if transformers does not import, or gives no answer in time."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(  # noqa: S603 our own code
            command, input=body, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return Description(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        msg = f"transformers cannot be asked about this model: {why}; run the check again, or reinstall transformers"
        raise ConfigError(msg) from error


def description_of(body: str) -> Description:
    """Describe a config.json in this process, which imports transformers."""
    from transformers.activations import ACT2CLS  # noqa: PLC0415 takes seconds
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415
    from transformers.models.auto import modeling_auto  # noqa: PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    fields, error, has_rope = json.loads(body), "", False
    if (model_type := fields.get("model_type")) in CONFIG_MAPPING:
        try:
            has_rope = hasattr(CONFIG_MAPPING[model_type](**fields), "rope_parameters")
        except Exception as problem:  # noqa: BLE001 of the model's own code
            error = " ".join(str(problem).split())
    return Description(
        classes=dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        value_heads=list(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        score_heads=list(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        activations=list(ACT2CLS),
        ropes=list(ROPE_INIT_FUNCTIONS),
        has_rope=has_rope,
        has_layers=_has_layers(str(model_type)),
        error=error,
    )


def _has_layers(model_type: str) -> bool:
    """Whether the code of a model uses transformers' class of layers; true if there is no code in its usual place.

    The code is read only: importing it imports torch.
    """
    from transformers.models.auto.configuration_auto import model_type_to_module_name  # noqa: PLC0415

    name = model_type_to_module_name(model_type)
    folder = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]
    code = Path(*(folder or ())[:1], "models", name, f"modeling_{name}.py")
    return not code.is_file() or "GradientCheckpointingLayer" in code.read_text()


def main() -> None:
    """Describe the configuration on the standard input."""
    sys.stdout.write(json.dumps(asdict(description_of(sys.stdin.read()))) + "\n")


if __name__ == "__main__":
    main()
