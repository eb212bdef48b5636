"""A fake model and a byte tokenizer for the engine: real tensors and block tables, no weights.

The K of a token is its id; the logits of a position are pseudo-random numbers made from a hash of
all visible ids, read back through the block tables. So any wrong block changes the answer, and the
right one is known from the context alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel
from pagedkv.kv_cache import CacheShape
from pagedkv.models import AttentionMetadata, LayerCache
from pagedkv.text import load_tokenizer

EOS = "<|im_end|>"
EOS_ID = 256
VOCAB = 260  # 256 bytes, two special tokens, two rows of padding
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class FakeModel:
    """Deterministic, batch-independent, exact. `before_step` may raise; `is_bad` picks contexts
    whose logits become NaN."""

    def __init__(self, block_size: int, *, ascii_only: bool = True) -> None:
        self.block_size = block_size
        self.ascii_only = ascii_only
        self.before_step: Callable[[torch.Tensor], None] = lambda input_ids: None
        self.is_bad: Callable[[np.ndarray], bool] = lambda context: False
        self.num_steps = 0
        self.num_tokens = 0
        self.max_query_lens: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        self.before_step(input_ids)
        self.num_steps += 1
        self.num_tokens += input_ids.numel()
        self.max_query_lens.append(attn_metadata.max_query_len)
        key_cache = kv_caches[0][0][:, 0, :, 0]  # [num_blocks, block_size]
        slots = attn_metadata.slot_mapping
        key_cache[slots // self.block_size, slots % self.block_size] = input_ids.float()
        hidden = torch.zeros(input_ids.numel(), 1, dtype=torch.float64)
        starts = attn_metadata.query_start_loc.tolist()
        for row, seq_len in enumerate(attn_metadata.seq_lens.tolist()):
            table = attn_metadata.block_tables[row, : -(-seq_len // self.block_size)].long()
            context = key_cache[table].reshape(-1)[:seq_len].numpy().astype(np.int64)
            first, last = starts[row], starts[row + 1] - 1
            assert positions[last] == seq_len - 1
            for place in range(first, last):
                hidden[place] = hash_of(context[: seq_len - last + place])
            hidden[last] = -1 if self.is_bad(context) else hash_of(context)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits_of(float(one), self.ascii_only) for one in hidden[:, 0]])


def hash_of(context: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(context, dtype=np.int64).tobytes())


def logits_of(hashed: float, ascii_only: bool) -> torch.Tensor:
    """[VOCAB]: readable bytes are likely, padding rows would win if they were not cut off."""
    if hashed < 0:
        return torch.full((VOCAB,), torch.nan)
    logits = np.random.default_rng(int(hashed)).normal(size=VOCAB) * 2
    if ascii_only:
        logits[:97] -= 100
        logits[123:256] -= 100
    logits[EOS_ID] -= 1.5
    logits[258:] += 1000
    return torch.from_numpy(logits.astype(np.float32))


def make_tokenizer_folder(folder: Path) -> Path:
    """A byte-level tokenizer without merges: each byte is a token, so characters are split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {char: number for number, char in enumerate(_byte_chars())}
    assert sorted(byte_of) == alphabet
    tokenizer = TokenizerFile(models.BPE(vocab=byte_of, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, "<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"eos_token": "{EOS}", "chat_template": "{TEMPLATE}"}}'
    )
    return folder


def _byte_chars() -> list[str]:
    """The character that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_engine(folder: Path, *, ascii_only: bool = True, **options: Any) -> Engine:
    """An engine on a new FakeModel, which is engine's `fake`."""
    config = EngineConfig.from_options("fake", **options)
    return Engine(load_fake(folder, config, ascii_only=ascii_only), config)


def load_fake(folder: Path, config: EngineConfig, *, ascii_only: bool = True) -> LoadedModel:
    return LoadedModel(
        model=FakeModel(config.cache.block_size, ascii_only=ascii_only),
        tokenizer=load_tokenizer(folder),
        eos_token_ids=frozenset([EOS_ID]),
        cache_shape=CacheShape(1, 1, 1, torch.float32),
        vocab_size=VOCAB,
        sampled_vocab_size=VOCAB - 2,
        max_model_len=config.max_model_len or 256,
    )
