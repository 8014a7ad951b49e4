"""Input processor of prompts whose media the run prepared: expanded token ids, features by reference, positions.

Nothing is decoded, resized or expanded here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from relax_actors.engines.sglang.media_reference import StoredItem, StoredMedia
from relax_actors.engines.sglang.server_models import media_models, tower_models
from relax_actors.engines.sglang.server_models.fractions import pack

CHANNELS = 3


class StoredMediaProcessor(BaseMultimodalProcessor):  # type: ignore[misc]
    """Reads the references of `MediaReferences`; refuses any other media."""

    models = (*media_models.EntryClass, *tower_models.EntryClass)
    auto_mm_processor_worker_num = 1
    preserve_processor_input_ids = True

    async def process_mm_data_async(
        self, image_data: Any = None, input_text: Any = None, request_obj: Any = None, **_: Any
    ) -> MultimodalProcessorOutput:
        """Return the features and positions of a request.

        Args:
            image_data: the reference of its media, in a list.
            input_text: its token ids.
            request_obj: the request.

        Raises:
            ValueError: the request has other media, or their features cannot be read.
        """
        if len(image_data or []) != 1 or request_obj.video_data or request_obj.audio_data:
            msg = "this server takes the media of a prompt as one reference to the store of its run"
            raise ValueError(msg)
        tokens, media = list(input_text), StoredMedia.decode(str(image_data[0]))
        items = [_item(one, media) for one in media.items]
        length = media.positions.shape[1]
        tail = np.broadcast_to(np.arange(length, len(tokens)) + media.delta, (CHANNELS, len(tokens) - length))
        positions = np.concatenate([media.positions.astype(np.float64), tail], axis=1)
        return MultimodalProcessorOutput(
            input_ids=tokens,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(tokens, items),
            mm_items=items,
            mrope_positions=pack(torch.from_numpy(positions)),
            mrope_position_delta=pack(torch.tensor([[media.delta]], dtype=torch.float64)),
        )


def _item(one: StoredItem, media: StoredMedia) -> MultimodalDataItem:
    features = torch.from_numpy(np.array(one.read()))
    data: dict[str, Any]
    if len(one.grid) == 1:  # of a sound
        features, data = features[None], {"frames": one.grid[0], "padding": one.padding}
    else:
        data = {"grid_thw": torch.tensor([one.grid]), "vision": media.vision}
    item = MultimodalDataItem(
        modality=Modality[one.kind.upper()], offsets=list(one.runs), feature=features, model_specific_data=data
    )
    # What the embeddings of a medium depend on, besides the weights.
    content = f"{one.kind} {one.features.xxh3_128} {one.grid} {one.padding}"
    item.set_identity(hashlib.sha256(content.encode()).digest())
    return item
