"""The operators' tests again on every instruction set that this processor has: each needs a
process of its own, as the choice is made once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUMERIC_TESTS = (
    "test_layers.py",
    "test_cache.py",
    "test_fused_rotary_reshape_and_cache.py",
    "test_merge_states.py",
)
ATTENTION_TESTS = ("test_paged_attention.py", "test_paged_attention_invariance.py")
CALL = """
import torch, pagedkv.ops
x = torch.ones(2, 8)
pagedkv.ops.rms_norm(x, x, torch.ones(8), 0.0)
"""


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PAGEDKV_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def available() -> list[str]:
    """The instruction sets that the refusal of a wrong one names."""
    refused = run("sse9", "-c", CALL)
    assert refused.returncode != 0
    message = re.search(
        r"RuntimeError: PAGEDKV_CPU_ISA is 'sse9'; this processor and build have: (.*)",
        refused.stderr,
    )
    assert message, refused.stderr
    return message.group(1).split(", ")


def test_there_is_always_a_plain_one(available) -> None:
    assert available[0] == "scalar"


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_the_numeric_tests_hold(isa: str, available) -> None:
    if isa not in available:
        pytest.skip(f"this processor has {', '.join(available)}")
    tested = run(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", *NUMERIC_TESTS)
    assert tested.returncode == 0, tested.stdout[-4000:]
    passed = re.search(r"(\d+) passed", tested.stdout)
    assert passed, tested.stdout[-4000:]
    assert int(passed.group(1)) > 500


# Attention alone has kernels for the bf16 dot product, and the tests of this process use the last.
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512_bf16"])
def test_attention_holds(isa: str, available) -> None:
    if isa not in available or isa == available[-1]:
        pytest.skip(f"this processor has {', '.join(available)}, tested here with the last")
    tested = run(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ATTENTION_TESTS)
    assert tested.returncode == 0, tested.stdout[-4000:]
    passed = re.search(r"(\d+) passed", tested.stdout)
    assert passed, tested.stdout[-4000:]
    assert int(passed.group(1)) > 130
