"""GPUs that a node may use."""

from __future__ import annotations

import pytest

from relax_actors.devices.inventory import Gpu, GpuRequest, Inventory, choose, simulate, visible_gpus
from relax_actors.errors import ConfigError

TWO = Inventory(tuple(Gpu(n, "H100", 80 << 30, f"GPU-{letter}123") for n, letter in enumerate("ab")))


def test_simulated_gpus_have_the_memory_that_is_asked_for() -> None:
    found = GpuRequest(simulated="8x40GiB").inventory()
    assert found.numbers == tuple(range(8))
    assert {gpu.memory for gpu in found.gpus} == {40 << 30}
    assert found.is_simulated
    assert str(found) == "8 GPUs (simulated GPU, 40 GiB) (--simulate-gpus)"
    assert simulate("1").gpus[0].memory == 80 << 30


@pytest.mark.parametrize("text", ["x", "8x", "8x80", "-1", "8x80GB", "99999"])
def test_a_text_that_says_no_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--simulate-gpus '{text}'.*8x80GiB"):
        simulate(text)


def test_gpus_of_a_machine_are_chosen_by_number() -> None:
    assert choose(TWO, "1").numbers == (1,)
    assert choose(TWO, "1,0").numbers == (1, 0)
    for text, said in (
        ("0,0", "not a list"),
        ("a", "not a list"),
        ("", "not a list"),
        ("0,2", "no GPU 2.*2 GPUs .H100, 80 GiB"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose(TWO, text)


def test_none_leaves_no_gpu_and_excludes_simulated_ones() -> None:
    assert GpuRequest("none").inventory().numbers == ()
    with pytest.raises(ConfigError, match="exclude each other"):
        GpuRequest("none", "8").inventory()


def test_what_cuda_would_see_is_what_a_node_may_use() -> None:
    for text, numbers in (("1", (1,)), ("GPU-b", (1,)), ("1, 0", (1, 0)), ("0,-1,1", (0,)), ("1,1,0", (1,)), ("", ())):
        found = visible_gpus(TWO.gpus, text)
        assert (found.numbers, found.is_simulated) == (numbers, False)
        assert f"CUDA_VISIBLE_DEVICES = {text!r}" in str(found)
    for text, said in (("7", "'7' is no GPU"), ("MIG-1", "MIG.*--gpus none")):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES = '{text}': .*{said}"):
            visible_gpus(TWO.gpus, text)
