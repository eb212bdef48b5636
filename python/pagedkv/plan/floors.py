"""Floors of a model's speed: no run of decodes or of a prompt takes less time, whatever the engine,
since the GPU's memory must be read at its rate and the products computed at its rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.models import ModelConfig, count_weights


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of one step. num_seqs sequences: decodes that see context_len tokens each, or
    one prompt of context_len tokens. num_tokens: of the step. bound: what the time is that of.
    """

    num_seqs: int
    context_len: int
    num_tokens: int
    num_bytes: float
    num_flops: float
    seconds: float
    bound: str

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Work:
    """What a model must read and compute. weights_bytes: read once a step, whatever its rows: the
    layers' matrices and the head. flops_per_token: of the layers' matrices; head_flops: of one row
    of logits.
    """

    config: ModelConfig
    bytes_per_token: int
    weights_bytes: int
    flops_per_token: int
    head_flops: int

    @classmethod
    def of(cls, config: ModelConfig, dtype_size: int, bytes_per_token: int) -> Work:
        """bytes_per_token: of K and V in the pool. dtype_size: bytes of a weight."""
        in_layers, head = count_weights(config), config.vocab_size * config.hidden_size
        return cls(
            config, bytes_per_token, (in_layers + head) * dtype_size, 2 * in_layers, 2 * head
        )

    def decode(self, num_seqs: int, context_len: int, bandwidth: float, flops: float) -> Floor:
        """A token of each of num_seqs sequences of context_len tokens, this one included:

        bytes = weights + num_seqs * (K and V of the tokens that each layer sees)
        FLOPs = num_seqs * (2 * weights + 4 * num_heads * head_dim * tokens, summed over layers)
        """
        seen = sum(min(context_len, window or context_len) for window in self._windows)
        read = self.bytes_per_token // self.config.num_layers * seen
        each = self.flops_per_token + self.head_flops + self._attention_flops(seen)
        return _floor(
            (num_seqs, context_len, num_seqs),
            self.weights_bytes + num_seqs * read,
            num_seqs * each,
            bandwidth,
            flops,
        )

    def prefill(self, prompt_len: int, bandwidth: float, flops: float) -> Floor:
        """A prompt of which nothing is cached, in one step, and its first token's logits:

        FLOPs = 2 * weights * prompt_len + 4 * num_heads * head_dim * pairs, summed over layers,
        pairs of a query and a key that it sees: prompt_len * (prompt_len + 1) / 2 without a window
        """
        pairs = sum(_pairs(prompt_len, window) for window in self._windows)
        num_flops = self.flops_per_token * prompt_len + self.head_flops
        return _floor(
            (1, prompt_len, prompt_len),
            self.weights_bytes + self.bytes_per_token * prompt_len,
            num_flops + self._attention_flops(pairs),
            bandwidth,
            flops,
        )

    @property
    def _windows(self) -> tuple[int, ...]:
        return self.config.layer_windows

    def _attention_flops(self, num_pairs: int) -> int:
        """Products of queries with keys and of probabilities with values: 2 FLOPs a number each."""
        return 4 * self.config.num_heads * self.config.head_dim * num_pairs


def _pairs(prompt_len: int, window: int) -> int:
    full = min(prompt_len, window or prompt_len)
    return full * (full + 1) // 2 + (prompt_len - full) * full


def _floor(
    shape: tuple[int, int, int], num_bytes: float, num_flops: float, bandwidth: float, flops: float
) -> Floor:
    reading, computing = num_bytes / bandwidth, num_flops / flops
    bound = "bandwidth" if reading >= computing else "FLOPs"
    return Floor(*shape, num_bytes, num_flops, max(reading, computing), bound)
