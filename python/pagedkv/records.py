"""What passes between the layers: a scheduled step, ended requests, outputs.

Steps are structs of arrays; an object for a single request stands only where that request changes
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.request import Request


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts. many: what follows any number but 1, None: one with an s.

    Example: counted(1, "token") -> "1 token"; counted(2, "is", "are") -> "2 are"
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at its place. rank: 1 is the most likely token there."""

    logprob: float
    rank: int


# Of one place: token id -> Logprob, the token that stands there first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]

FinishReason = Literal["stop", "length", "abort", "error"]


# In the token ids of a running sequence: a step that is on its way chooses it.
PENDING = -1


def no_pairs() -> NDArray[np.int64]:
    """No pairs of blocks: int64 [0, 2]."""
    return np.empty((0, 2), dtype=np.int64)


def no_evictions() -> NDArray[np.int64]:
    """No evicted blocks: int64 [0, 4]."""
    return np.empty((0, 4), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run's scheduler and block manager are made from beside its options.

    num_blocks, num_cpu_blocks: of the pools. bytes_per_token: K and V of all layers, as stored.
    model, dtype (of activations), num_layers, num_kv_heads, head_dim: for the reader; nothing is
    decided by them. window: tokens that every layer sees at most, the newest included; 0: some
    layer sees all.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_token: int
    max_model_len: int
    num_blocks: int
    num_cpu_blocks: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a GPU. weights: tables of positions included. step: what the largest step takes
    beside them at its peak. libraries: CUDA's context, code of kernels, workspaces. pool: of
    num_blocks. cpu_pool: pinned memory of the host, of num_cpu_blocks.
    """

    weights_bytes: int
    step_bytes: int
    graphs_bytes: int
    libraries_bytes: int
    num_blocks: int
    pool_bytes: int
    num_cpu_blocks: int
    cpu_pool_bytes: int

    @property
    def used_bytes(self) -> int:
        """Of the GPU, once a step of the largest size has run."""
        fixed = self.weights_bytes + self.step_bytes + self.graphs_bytes + self.libraries_bytes
        return fixed + self.pool_bytes


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that got a slot in this step. num_cached_tokens: found in the prefix cache, or, if
    is_resumed, brought back from the CPU.
    """

    request: Request
    slot: int
    num_cached_tokens: int
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class PreemptionChoice:
    """How a victim's K/V comes back, and the numbers that decided it: num_blocks that it alone
    holds, num_tokens to compute again, the cost either way. Forks and beams of one request are
    priced, and swapped, as a unit of num_sequences: what they share counts once.
    """

    swaps: bool
    why: str
    num_blocks: int
    num_cpu_free: int
    num_tokens: int
    swap_us: float
    recompute_us: float
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that gave up its blocks and waits again, with the numbers behind it. Of a unit each
    sequence has one, with the unit's choice.

    displaced_by: the more urgent request that takes its place; None: running requests grew.
    """

    request_id: str
    slot: int
    num_blocks_needed: int
    num_blocks_available: int
    choice: PreemptionChoice
    displaced_by: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """One step, as arrays over its rows: rows with one token first, then chunks of prompts.

    slots, seq_ids int64 [num_rows]; query_lens int64 [num_rows], this step's tokens of each row;
    sample_rows int64 [num_samples], rows that reach their newest known token and so get a next one,
    ascending; a prompt with several answers has its row once for each. sample_draws int64
    [num_samples]: the draw of each. swap_out, swap_in, copies int64 [n, 2], pairs of blocks to run
    in this order before the forward pass: (block, CPU block), (CPU block, block), copy-on-write.
    forked: forks that got a slot since the step before. evicted int64 [n, 4]: cached blocks
    given up for this step, (block_id, the seq_id that needed it, steps it was idle, the CPU block
    it moved to or -1); with block_id -1, what the CPU gave up.
    """

    step_id: int
    slots: NDArray[np.int64]
    seq_ids: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sample_draws: NDArray[np.int64]
    num_tokens: int
    copies: NDArray[np.int64]
    admitted: tuple[Admitted, ...]
    preempted: tuple[Preempted, ...]
    forked: tuple[Admitted, ...] = ()
    swap_out: NDArray[np.int64] = field(default_factory=no_pairs)
    swap_in: NDArray[np.int64] = field(default_factory=no_pairs)
    evicted: NDArray[np.int64] = field(default_factory=no_evictions)


def empty_step() -> ScheduledStep:
    """A step without rows, which a launch of padding alone stands for."""
    nothing = np.empty(0, dtype=np.int64)
    return ScheduledStep(
        step_id=0,
        slots=nothing,
        seq_ids=nothing,
        query_lens=nothing,
        sample_rows=nothing,
        sample_draws=nothing,
        num_tokens=0,
        copies=no_pairs(),
        admitted=(),
        preempted=(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What beams may go on with, best first. samples int64 [n]: their indices into sample_rows;
    token_ids int64, logprobs float64 [n, max_num_candidates].
    """

    samples: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRequest:
    """A request, or one answer of a group, that left the scheduler. token_ids int32 [num
    generated]; cumulative_logprob: of these tokens, None where it is not tracked.
    """

    request: Request
    token_ids: NDArray[np.int32]
    reason: FinishReason
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. stop_reason: the stop string or stop token id that ended it; None for the end-of-
    sequence token and other reasons. cumulative_logprob: sum of its tokens' log-probabilities under
    the model itself, before temperature, top-k and top-p; None for a request with one answer.
    logprobs: of each of token_ids, where asked for; of the model itself too.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. error says why when finish_reason is "error". prompt_ids: int32
    [prompt_len]. prompt_logprobs: of each of them, where asked for; None for the first, and fewer
    if it ended before.
    """

    request_id: str
    prompt: str | None
    prompt_ids: NDArray[np.int32] = field(repr=False, compare=False)
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """prompt_ids, a new list each time: to make one takes longer than all else of an output."""
        ids: list[int] = self.prompt_ids.tolist()
        return ids

    @property
    def prompt_len(self) -> int:
        return int(self.prompt_ids.size)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to answer `index` of a streamed request. The texts of all its deltas,
    joined, are the finished output's text. logprobs: of these token_ids, where asked for.
    finish_reason, stop_reason: of the answer's last delta, as in CompletionOutput.
    """

    request_id: str
    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step of the engine has for its callers."""

    deltas: list[OutputDelta]
    finished: list[RequestOutput]


DecisionKind = Literal[
    "queued",
    "forked",
    "waits",
    "admitted",
    "evicted",
    "dropped",
    "resumed",
    "preempted",
    "swap_dropped",
    "finished",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the scheduler decided about a request, from one step to another, with the numbers behind
    it. text: the same in plain words.
    """

    kind: DecisionKind
    step: int
    last_step: int
    numbers: Mapping[str, int | float | str | tuple[int, ...] | None]
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decisions about one request, oldest first. num_forgotten: of those in the middle, to
    bound the memory.
    """

    request_id: str
    decisions: tuple[Decision, ...]
    num_forgotten: int

    @property
    def text(self) -> str:
        """Plain words, a line for each decision."""
        lines = []
        for i, one in enumerate(self.decisions):
            if self.num_forgotten and i == 1:
                lost = counted(self.num_forgotten, "decision is not", "decisions are not")
                lines.append(f"... {lost} kept")
            steps = f"step {one.step}"
            if one.last_step != one.step:
                steps = f"steps {one.step} to {one.last_step}"
            lines.append(f"{steps}: {one.text}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """A step that has ended, in seconds of the engine's clock."""

    step: ScheduledStep
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """What happened between two looks at a run, oldest first. num_lost: steps before these that
    were too many to keep.
    """

    steps: tuple[Landed, ...]
    ended: tuple[FinishedRequest, ...]
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A sequence that a look at a run has for the first time. (rank, seq_id) orders those that run
    or wait. request: None for one that has ended, whose blocks are pinned. forked_from: the request
    that it, or what it is a fork of, was forked from first.
    """

    seq_id: int
    request_id: str
    rank: int
    request: Request | None
    forked_from: str | None


@dataclass(frozen=True, slots=True, eq=False)
class QueueLook:
    """The queues at one moment: seq_ids int64 of the running, of those that wait or are swapped out
    (is_swapped bool, as many), in order of turn, and of pinned ones.

    first_seen: those that no look had before. reasons: (seq_id, why it waits, in words), where that
    is new; of running ones too, whose prompts a more urgent one passes, and "" when that is over.
    """

    running: NDArray[np.int64]
    queued: NDArray[np.int64]
    is_swapped: NDArray[np.bool_]
    pinned: NDArray[np.int64]
    first_seen: tuple[Seen, ...]
    reasons: tuple[tuple[int, str], ...]
