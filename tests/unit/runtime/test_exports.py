"""Public names of the runtime package, which are imported on first use."""

from __future__ import annotations

import pytest

from relax_actors import runtime


@pytest.mark.parametrize("name", runtime.__all__)
def test_exported_name_can_be_imported(name: str) -> None:
    assert getattr(runtime, name) is not None


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Rolle'; it exports .*Role"):
        _ = runtime.Rolle
