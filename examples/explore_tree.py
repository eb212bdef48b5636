"""Explores a tree of continuations: every node goes on for some tokens, forks, and only the
branches that a score likes best live on. All share the blocks of what they have in common.

Run: python examples/explore_tree.py ["A prompt"]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pagedkv import SamplingParams
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine


def explore(
    engine: Engine,
    prompt: str,
    score: Callable[[str], float],
    *,
    depth: int = 3,
    branches: int = 3,
    keep: int = 2,
    tokens_per_level: int = 12,
) -> list[tuple[float, str]]:
    """(score, text) of the leaves, best first."""
    params = SamplingParams(
        temperature=0.9, seed=0, max_tokens=depth * tokens_per_level, ignore_eos=True
    )
    engine.add_request("root", prompt, params, stream=True)
    texts = {"root": ""}  # of the branches that live
    leaves: list[tuple[float, str]] = []
    for level in range(depth):
        for _ in range(tokens_per_level):
            result = engine.step()
            for delta in result.deltas:
                texts[delta.request_id] += delta.text
            leaves += [(score(one.outputs[0].text), one.outputs[0].text) for one in result.finished]
        if level == depth - 1:
            break
        ranked = sorted(texts, key=lambda name: score(texts[name]), reverse=True)
        for name in ranked[keep:]:
            engine.abort(name)  # its blocks are free again, except those that others share
            del texts[name]
        for name in ranked[:keep]:
            for child in engine.fork(name, branches - 1, stream=True):
                texts[child] = texts[name]
        statistics = engine.statistics()
        print(
            f"level {level + 1}: {len(texts)} branches in {statistics.num_referenced} blocks, "
            f"{statistics.num_shared} of them shared"
        )
    return sorted(leaves, reverse=True)


def variety(text: str) -> float:
    """Different words in a text: repeating itself is what small models do worst."""
    return len(set(text.lower().split()))


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time, in a small village,"
    engine = Engine.from_config(EngineConfig.from_options("smollm2"))
    for points, text in explore(engine, prompt, variety)[:3]:
        print(f"\n{points:g} different words:{text}")


if __name__ == "__main__":
    main()
