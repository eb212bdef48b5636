"""The table of GPUs, and GPUs that are described by numbers."""

from __future__ import annotations

import pytest

from pagedkv.plan import GPUS, find_gpu


def test_the_table_is_in_bytes_per_second_and_says_where_it_is_from() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name == name.lower()
        assert gpu.source
        if name == "cpu":
            assert (gpu.memory_bytes, gpu.bandwidth, gpu.flops) == (None, None, None)
            continue
        assert gpu.memory_bytes is not None
        assert gpu.bandwidth is not None
        assert gpu.flops is not None
        assert 20 * 2**30 < gpu.memory_bytes < 200 * 2**30
        assert 2e11 < gpu.bandwidth < 1e13
        assert 5e13 < gpu.flops < 3e15
    assert {"h200", "h100", "a100-80", "l40s", "rtx-4090", "cpu"} <= set(GPUS)


@pytest.mark.parametrize("name", ["H200", "h200", "RTX 4090", "rtx_4090", "RTX-4090", "a100_80"])
def test_names_are_found_as_people_write_them(name: str) -> None:
    assert find_gpu(name).name in ("h200", "rtx-4090", "a100-80")


def test_given_numbers_replace_those_of_the_table() -> None:
    gpu = find_gpu("h200", bandwidth=4.55e12)
    assert (gpu.bandwidth, gpu.flops) == (4.55e12, GPUS["h200"].flops)
    assert gpu.source.endswith("as given: bandwidth")
    own = find_gpu(None, memory_bytes=2**34)
    assert (own.memory_bytes, own.bandwidth, own.flops) == (2**34, None, None)
    cpu = find_gpu("cpu", bandwidth=5e10, flops=1e12)
    assert (cpu.memory_bytes, cpu.bandwidth) == (None, 5e10)


def test_what_is_not_known_is_named_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"no GPU 'h2000' in the table; known are h200, h100, .*"):
        find_gpu("h2000")
    with pytest.raises(ValueError, match=r"give a GPU: --gpu NAME or its --memory; known are h200"):
        find_gpu(None, bandwidth=1e12)
    with pytest.raises(ValueError, match="a CPU's pool is sized by --kv-cache-memory-bytes"):
        find_gpu("cpu", memory_bytes=2**34)
    for numbers in ({"memory_bytes": 0}, {"bandwidth": -1.0}, {"flops": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(numbers))} must be above 0, got"):
            find_gpu("h200", **numbers)  # type: ignore[arg-type]
