"""Runs a model over a paged cache as an engine would: shuffled blocks, chunks, several sequences in
one step. Whatever it does not own is poison: NaN in the cache, absurd ids in the tables' tails and
for blocks behind a window that all layers have.
"""

from __future__ import annotations

import random

import torch

from pagedkv.models import AttentionMetadata, CausalLM, LayerCache

POISON_ID = 2**31 - 1


class PagedRun:
    """A cache for num_seqs sequences of at most max_len tokens, and how far each has come."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_seqs: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        per_seq = -(-max_len // block_size)
        num_blocks = num_seqs * per_seq + 3
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        ids = random.Random(seed).sample(range(num_blocks), num_seqs * per_seq)
        self.tables = [ids[i * per_seq : (i + 1) * per_seq] for i in range(num_seqs)]
        self.lens = [0] * num_seqs

    def step(self, new: dict[int, list[int]]) -> torch.Tensor:
        """Feed new tokens of some sequences; returns hidden states [num_tokens, hidden_size]."""
        positions, slots, starts = [], [], [0]
        for seq, ids in new.items():
            begin = self.lens[seq]
            self.lens[seq] += len(ids)
            for position in range(begin, self.lens[seq]):
                block = self.tables[seq][position // self.block_size]
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(starts[-1] + len(ids))
        tables = torch.full((len(new), len(self.tables[0]) + 1), POISON_ID, dtype=torch.int32)
        for row, seq in enumerate(new):
            used = -(-self.lens[seq] // self.block_size)
            tables[row, :used] = torch.tensor(self.tables[seq][:used])
            window = self.model.config.window
            begin = self.lens[seq] - len(new[seq])
            if window:
                behind = max(0, begin - window + 1) // self.block_size
                tables[row, :behind] = POISON_ID
                self.cache[:, :, self.tables[seq][:behind]] = float("nan")
        metadata = AttentionMetadata(
            block_tables=tables,
            seq_lens=torch.tensor([self.lens[seq] for seq in new], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(map(len, new.values())),
        )
        return self.model.forward(
            torch.tensor([one for ids in new.values() for one in ids]),
            torch.tensor(positions),
            [LayerCache(layer[0], layer[1]) for layer in self.cache],
            metadata,
        )

    def logits(self, seq: int, ids: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits [len(ids), vocab_size] of one sequence, fed in chunks of these sizes."""
        assert sum(chunks) == len(ids)
        parts, at = [], 0
        for size in chunks:
            parts.append(self.model.compute_logits(self.step({seq: ids[at : at + size]})))
            at += size
        return torch.cat(parts)


def greedy(run: PagedRun, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts, side by side in one batch."""
    hidden = run.step(dict(enumerate(prompts)))
    last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    ids = run.model.compute_logits(hidden[last]).argmax(-1).tolist()
    found = [[one] for one in ids]
    for _ in range(num_tokens - 1):
        hidden = run.step({seq: [one] for seq, one in enumerate(ids)})
        ids = run.model.compute_logits(hidden).argmax(-1).tolist()
        for seq, one in enumerate(ids):
            found[seq].append(one)
    return found


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The smallest cosine of any row of a with the same row of b."""
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min())
