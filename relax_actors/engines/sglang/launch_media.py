"""Preparation of a server whose model takes media, and which families SGLang serves."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from relax_actors.engines.sglang import server_models, server_processors
from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES, FamilySpec
from relax_actors.media.family import Family, family_of


def served_family(model: Path) -> Family | None:
    """Return the family of a model folder, if it takes media; raises ConfigError if SGLang does not serve it."""
    family = family_of(model)
    if family is not None and not family.spec.sglang.architecture:
        served = ", ".join(spec.model_type for spec in FAMILIES.values() if spec.sglang.architecture)
        msg = (
            f'rollout.backend = "sglang" with a model of type {family.model_type}: among models that see or hear only '
            f'{served} are supported; use "transformers"'
        )
        raise ConfigError(msg)
    if family is not None and (known := family.spec.sglang.decoders):
        of_text = json.loads((model / "config.json").read_text())["text_config"].get("model_type")
        if of_text not in known:
            msg = (
                f'rollout.backend = "sglang" with a model of type {family.model_type} whose text_config.model_type is '
                f'{of_text!r}: it serves {", ".join(known)}; use "transformers"'
            )
            raise ConfigError(msg)
    return family


def prepare_media(model: Path, spec: FamilySpec, *, deterministic: bool) -> Path:
    """Point SGLang to the run's models and input processor; return the folder that it is started with.

    The folder has all files of the model folder but its weights, which the actor loads, and a config that SGLang
    understands. It lies in the temporary folder, which is removed with the server. With `deterministic`, the bits of a
    row do not depend on the rows before it.
    """
    if deterministic:
        # Which media of a row a tower encodes together would depend on those in the cache, and the bits on that.
        os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        # The samples of a request with media reach the scheduler one by one; without this it computes the first ones
        # before the others are there, in batches that depend on time, and the bits on the batches.
        os.environ["SGLANG_ENABLE_COLOCATED_BATCH_GEN"] = "1"
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = server_models.__name__
    os.environ["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] = server_processors.__name__
    os.environ["SGLANG_EXTERNAL_MM_MODEL_ARCH"] = spec.sglang.architecture
    body = json.loads((model / "config.json").read_text())
    if spec.vision is not None and not spec.whole:
        body["vision_config"] = {**spec.sglang.vision_fields, **body["vision_config"]}
    if spec.whole and body.get("model_type") == spec.model_type:
        body = {"model_type": spec.whole, "thinker_config": body, "enable_audio_output": False}
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file.absolute())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(body | {"architectures": [spec.sglang.architecture]}))
    return folder


def replace_processors() -> None:
    """Make SGLang import the run's input processor only, and none of the model's own: the role `media` did its work.

    Its other processors take a minute of CPU time to import. Importing the run's one here reports an error in it, which
    SGLang would only log.
    """
    from sglang.srt.managers import tokenizer_manager  # noqa: PLC0415

    from relax_actors.engines.sglang.server_processors import stored_media  # noqa: F401, PLC0415

    import_processors = tokenizer_manager.import_processors

    def import_own(package: str, *, overwrite: bool = False) -> None:
        if package == server_processors.__name__:
            import_processors(package, overwrite)

    tokenizer_manager.import_processors = import_own
    tokenizer_manager.get_processor_wrapper = lambda: None
