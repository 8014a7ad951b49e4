"""Both weight transports bring the same bits."""

from __future__ import annotations

from tests.conformance.base.weight_transport import WeightTransportConformance


class TestStoreTransport(WeightTransportConformance):
    implements = "store"
    settings = ("weights.transport=store",)
    from_memory = False


class TestTorchTransport(WeightTransportConformance):
    implements = "torch"
    settings = ("weights.transport=torch", "weights.patience=5")
    from_memory = True
