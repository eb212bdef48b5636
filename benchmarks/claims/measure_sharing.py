"""What sharing saves. Prefix: k requests with a prefix of 1,000 tokens in common, 100 tokens of
their own and 100 of output, at their ends; memory as Llama-3.1-8B needs it, 131,072 bytes a token.
Samples and beams: the engine on SmolLM2-135M on a CPU, two prompts of 150 tokens, 64 of output;
saved are blocks that tables name more than once, as part of all that tables name, the mean over all
steps; copied are blocks, by copy-on-write or, without pages, with the whole context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from claims.contiguous import ContiguousManager
from claims.engines import make_engine
from claims.figures import axes
from claims.h200 import BYTES_PER_TOKEN
from claims.reserving import Reservation
from claims.systems import MAX, ORACLE, PAGED, System
from claims.tables import select, value
from pagedkv.block_manager import BlockManager
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.sampling_params import SamplingParams
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_SIZE = 16
PREFIX_LEN, OWN_LEN, OUTPUT_LEN = 1000, 100, 100
MAX_MODEL_LEN = 2048
COUNTS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (2, 4, 6)
KINDS: dict[str, Callable[[int, int], SamplingParams]] = {
    "parallel sampling": lambda n, length: SamplingParams(
        n=n, temperature=1.0, max_tokens=length, ignore_eos=True, seed=0
    ),
    "beam search": lambda n, length: SamplingParams(
        n=n, beam_width=n, temperature=0, max_tokens=length, ignore_eos=True
    ),
}


def measure(*, quick: bool) -> list[Row]:
    config = EngineConfig.from_options(
        "smollm2",
        device="cpu",
        num_gpu_blocks_override=1000,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
    )
    num_prompts, length = (1, 12) if quick else (2, 64)
    return prefix_rows() + group_rows(load(config), config, num_prompts, length)


# -- a common prefix -------------------------------------------------------------------


def prefix_rows() -> list[Row]:
    """x baseline: memory over that of paging."""
    made = []
    for count in COUNTS:
        needed = {
            "paged": paged_blocks(count),
            ORACLE.name: contiguous_blocks(ORACLE, count),
            MAX.name: contiguous_blocks(MAX, count),
        }
        for name, blocks in needed.items():
            gib = blocks * BLOCK_SIZE * BYTES_PER_TOKEN / 2**30
            rate = f"{blocks:,} blocks, {gib:.3f} GiB"
            factor = blocks / needed["paged"]
            made.append(Row(name, f"{count} requests, common prefix", 0.0, rate, baseline=factor))
    return made


def _prompts(count: int) -> list[list[int]]:
    source = np.random.default_rng(0)
    prefix = source.integers(0, 30_000, PREFIX_LEN).tolist()
    return [prefix + source.integers(0, 30_000, OWN_LEN).tolist() for _ in range(count)]


def paged_blocks(count: int) -> int:
    """Blocks that count requests hold at their ends, one behind the other and all kept."""
    manager = BlockManager(count * 200, BLOCK_SIZE)
    for seq_id, prompt in enumerate(_prompts(count)):
        manager.allocate(seq_id, prompt)
        manager.publish(seq_id, [], len(prompt))
        manager.append(seq_id, OUTPUT_LEN - 1)
    manager.check_invariants()
    return int(manager.statistics().num_referenced)


def contiguous_blocks(system: System, count: int) -> int:
    manager = ContiguousManager(count * 200, BLOCK_SIZE)
    for seq_id, prompt in enumerate(_prompts(count)):
        salt = system.salt(str(seq_id), len(prompt), OUTPUT_LEN, 1, MAX_MODEL_LEN)
        manager.allocate(seq_id, prompt, extra_key=salt.encode())
    manager.check_invariants()
    return int(manager.statistics().num_referenced)


# -- several answers -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """saved: part of the blocks that tables name; copies: blocks. num_tokens: of all answers that
    were computed.
    """

    saved: float
    copies: int
    num_steps: int


def group_rows(
    loaded: LoadedModel, config: EngineConfig, num_prompts: int, length: int
) -> list[Row]:
    """x baseline: blocks copied without pages over those with."""
    source = np.random.default_rng(1)
    prompt_len = min(150, loaded.max_model_len - length)
    prompts = source.integers(100, loaded.vocab_size, (num_prompts, prompt_len)).tolist()
    made = []
    for kind, params_of in KINDS.items():
        for width in WIDTHS:
            params = params_of(width, length)
            found = [run_groups(one, loaded, config, prompts, params) for one in (PAGED, ORACLE)]
            paged, contiguous = found
            made.append(
                Row(
                    kind,
                    f"{width} answers, {num_prompts} prompts of {prompt_len} + {length} tokens",
                    0.0,
                    f"saved {100 * paged.saved:.1f} % of the blocks; copied {paged.copies} blocks "
                    f"paged, {contiguous.copies} blocks contiguous, in {paged.num_steps} steps",
                    baseline=contiguous.copies / paged.copies,
                )
            )
    return made


def run_groups(
    system: System,
    loaded: LoadedModel,
    config: EngineConfig,
    prompts: list[list[int]],
    params: SamplingParams,
) -> Group:
    """One prompt after the other."""
    engine = make_engine(system, loaded, config)
    parts: list[float] = []
    num_steps = 0
    for i, prompt in enumerate(prompts):
        salt = None
        if system.policy is not None:
            tokens = len(prompt) + (params.max_tokens or 0) - 1
            salt = Reservation(str(i), tokens, params.num_forks).salt
        engine.add_request(str(i), prompt, params, cache_salt=salt)
        while engine.has_work:
            engine.step()
            num_steps += 1
            if system.policy is None:
                parts += _saved_now(engine)
    engine.check_invariants()
    copies = int(engine.statistics().num_copies)
    return Group(float(np.mean(parts)) if parts else 0.0, copies, num_steps)


def _saved_now(engine: Engine) -> list[float]:
    snapshot: Any = engine.cache_view().snapshot
    named = snapshot.block_ids
    if snapshot.seq_ids.size < 2:
        return []
    return [1 - np.unique(named).size / named.size]


def draw(table: list[Row]) -> Figure:
    figure, (left, middle, right) = axes(1, 3, size=(9.5, 3.2))
    for name, color in (("contiguous, max", "#c8553d"), (ORACLE.name, "#4a7fb5")):
        mine = [row for row in select(table, name=name) if "common prefix" in row.shape]
        counts = [int(row.shape.split()[0]) for row in mine]
        left.plot(counts, [value(row, "GiB") for row in mine], color=color, label=name, marker=".")
    paged = [row for row in select(table, name="paged") if "common prefix" in row.shape]
    left.plot(COUNTS, [value(row, "GiB") for row in paged], color="#0b6e4f", label="paged")
    left.set_xlabel("requests with 1,000 tokens in common")
    left.set_ylabel("GiB (Llama-3.1-8B)")
    left.legend(fontsize=7)
    for shift, (kind, color) in enumerate(zip(KINDS, ("#4a7fb5", "#e0a458"), strict=True)):
        mine = select(table, name=kind)
        places = [i + 0.4 * shift for i in range(len(mine))]
        middle.bar(places, [value(row, "saved") for row in mine], 0.38, color=color, label=kind)
        right.bar(places, [value(row, "copied") for row in mine], 0.19, color=color, label=kind)
        wide = [value(row, "blocks contiguous") for row in mine]
        right.bar([x + 0.19 for x in places], wide, 0.19, color=color, alpha=0.5)
    for panel in (middle, right):
        panel.set_xticks([0.2, 1.2, 2.2], [str(width) for width in WIDTHS])
        panel.set_xlabel("answers to a prompt")
        panel.legend(fontsize=7)
    middle.set_ylabel("% of blocks saved")
    right.set_ylabel("blocks copied (pale: contiguous)")
    right.set_yscale("log")
    return figure
