"""The weight transport brings the bits that were published."""

from __future__ import annotations

from tests.conformance.base.weight_transport import WeightTransportConformance


class TestStoreTransport(WeightTransportConformance):
    implements = "store"
    settings = ("weights.transport=store",)
