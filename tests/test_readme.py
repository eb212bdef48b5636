"""The README's Python examples run as they stand, each in a process of its own, and say what the
comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example_with(text: str) -> str:
    (found,) = [code for code in EXAMPLES if text in code]
    return found


def test_every_example_is_run_here() -> None:
    assert len(EXAMPLES) == 3


def test_the_block_manager_example_without_torch() -> None:
    code = example_with("manager.fork(8, 9)")
    out = run(code + "\nimport sys; assert 'torch' not in sys.modules")
    cached, copies, table = out.splitlines()
    assert cached == "96"
    assert re.fullmatch(r"\[\(\d+, \d+\)\]", copies)
    assert table.endswith(" 6")


def test_the_ops_example_equals_plain_attention() -> None:
    code = example_with("ops.paged_attention")
    check = """
q, k, v = (t.transpose(0, 1) for t in (query, key, value))
expected = torch.nn.functional.scaled_dot_product_attention(
    q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), is_causal=True)
torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-4, atol=1e-4)
"""
    run(code + check)


@pytest.mark.model
def test_the_engine_example() -> None:
    out = run(example_with("llm.generate"))
    assert "The capital of France is ->" in out
    assert "Paris" in out
