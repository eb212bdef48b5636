"""Every way through the kernels, and the engine, on a GPU that is not the current one. The
operators' contract there is in test_cuda_every_op.py."""

from __future__ import annotations

import pytest
import torch
from gpu_attention_cases import E4M3, Case, Problem, check, decode
from gpu_prefix_cases import MIXED
from operands import assert_same
from small_llama import answers, engine_on
from test_cuda_sanitize import SANITIZE

from pagedkv import ops
from pagedkv.ops import reference
from pagedkv.sampling_params import SamplingParams

ROWS = (*decode(33, 700, 0), (150, 400))
CASES = (
    Case("small_batch", decode(33, 700, 0)),
    Case("small_batch_fp8", decode(33, 700), cache_dtype=E4M3),
    Case("decode", decode(*range(20, 80))),
    Case("pieces", ROWS, num_splits=3),
    Case("prefill_beside_decode", ROWS),
    Case("head_dim_256", ROWS, head_dim=256),
    Case("fp8", ROWS, cache_dtype=E4M3),
    Case("plain", ROWS, block_size=3),
    MIXED,
)


@pytest.fixture
def other(device: torch.device) -> torch.device:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", (device.index + 1) % count)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case, device: torch.device, other: torch.device) -> None:
    # There first, then here: what the first call sets up holds for its own device only.
    for place in (other, device):
        problem = Problem(case, place)
        out, lse = problem.run()
        assert torch.cuda.current_device() == device.index
        torch.cuda.synchronize(place)
        check(problem, out, lse)


@pytest.mark.parametrize("name", SANITIZE)
def test_small_ops(name: str, device: torch.device, other: torch.device) -> None:
    torch.manual_seed(0)
    got = SANITIZE[name](ops, other)
    assert torch.cuda.current_device() == device.index
    torch.manual_seed(0)
    want = SANITIZE[name](reference, other)
    torch.cuda.synchronize(other)
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), expected.float(), atol=0.13, rtol=0.04)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_engine(enforce_eager: bool, device: torch.device, other: torch.device) -> None:
    prompts = [[5, 6, 7], list(range(100, 190)), [9]]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    options = {"num_gpu_blocks_override": 60, "enforce_eager": enforce_eager}
    right = answers(engine_on(device, **options), prompts, greedy)
    engine = engine_on(other, **options)
    assert answers(engine, prompts, greedy) == right
    assert torch.cuda.current_device() == device.index
    assert engine._runner._kv_cache.tensor.device == other


def test_a_copy_between_blocks_of_two_devices_is_refused(
    device: torch.device, other: torch.device
) -> None:
    pools = [torch.zeros(1, 2, 4, 2, 16, 64, device=place) for place in (device, other)]
    with pytest.raises(RuntimeError, match=r"destination is on cuda:\d, expected cpu or cuda:\d"):
        ops.swap_blocks(*pools, torch.tensor([[0, 1]]))
    for pool in pools:
        assert_same(pool, torch.zeros_like(pool))
