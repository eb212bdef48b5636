"""What preempting a request costs either way: its blocks moved out and back, or its tokens computed
again. Arithmetic on numbers; the engine measures the rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.records import PreemptionChoice, counted


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured as the engine runs. The starting values stand until the first measurement: half of
    what PCIe 4 x16 moves, and the prefill of a small model on a CPU. step_s: what a step with a
    prompt takes however short that is, since its kernels must be launched and all weights read.
    """

    link_bytes_per_s: float = 12e9
    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.0


def swap_in_cost(rates: Rates, *, bytes_per_block: int, block_size: int) -> float:
    """What bringing a cached block back from the CPU costs, as a multiple of what computing it
    costs: (bytes_per_block / link_bytes_per_s) / (block_size / prefill_tokens_per_s).

    Example:
        1.2 MB at 12 GB/s: 0.1 ms; 16 tokens at 2,000 tokens/s: 8 ms -> 0.0125
    """
    swap_in_s = bytes_per_block / rates.link_bytes_per_s
    return swap_in_s * rates.prefill_tokens_per_s / block_size


def choose(
    mode: str,
    *,
    is_waiting_beam: bool = False,
    num_blocks: int,
    num_cpu_free: int,
    num_tokens: int,
    bytes_per_block: int,
    rates: Rates,
    num_sequences: int = 1,
) -> PreemptionChoice:
    """Swap or recompute one victim, or a unit of num_sequences.

    swap costs 2 * num_blocks * bytes_per_block / link_bytes_per_s, out and back;
    recompute costs num_tokens / prefill_tokens_per_s, and step_s at least. Under "auto" the cheaper
    one is taken, equals by recompute. Without enough CPU blocks, or without a block of its own, it
    is recompute always.

    Args:
        mode: swap, recompute or auto.
        is_waiting_beam: it has computed all its tokens, so nothing would be left to go on with.
        num_blocks: that the victim alone holds; swapping frees exactly these.
        num_tokens: that it has computed, and would compute again.

    Example:
        10 blocks of 1.2 MB at 12 GB/s: 2 ms; 160 tokens at 2,000 tokens/s: 80 ms -> swap
        the same blocks; at 100,000 tokens/s 1.6 ms, but a step takes 5 ms -> swap
    """
    swap_us = 2e6 * num_blocks * bytes_per_block / rates.link_bytes_per_s
    recompute_us = 1e6 * max(num_tokens / rates.prefill_tokens_per_s, rates.step_s)
    if mode == "recompute":
        swaps, why = False, "preemption_mode is recompute"
    elif is_waiting_beam:
        swaps, why = False, "a beam that waits for others computes its last token again"
    elif num_blocks == 0:
        swaps, why = False, "it holds no block alone"
    elif num_blocks > num_cpu_free:
        needed = counted(num_blocks, "CPU block is", "CPU blocks are")
        swaps, why = False, f"{needed} needed and {counted(num_cpu_free, 'is', 'are')} free"
    elif mode == "swap":
        swaps, why = True, "preemption_mode is swap"
    else:
        swaps = swap_us < recompute_us
        why = f"moving {swap_us:.0f} us, computing again {recompute_us:.0f} us"
    return PreemptionChoice(
        swaps=swaps,
        why=why,
        num_blocks=num_blocks,
        num_cpu_free=num_cpu_free,
        num_tokens=num_tokens,
        swap_us=swap_us,
        recompute_us=recompute_us,
        num_sequences=num_sequences,
    )
