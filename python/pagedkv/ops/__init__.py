"""Paged attention, cache and sampling operators, for CPU and CUDA tensors.

Each function here is one operator of `csrc/ops/schemas.cpp`, with its arguments in its order and
by its names; outputs are arguments. What is written shares no memory with the other operands,
except where "may be" says that it may be one of them, whole. They work under
`torch.compile(fullgraph=True)`. The fp32 oracle of the same signatures is
`pagedkv.ops.reference`. Importing this package loads the compiled libraries.

Words: a *block* holds the keys and values of `block_size` tokens; the *slot* of a token is
`block_id * block_size + offset`; a *block table* lists a sequence's blocks in order.
"""

from __future__ import annotations

from pagedkv.ops.library import load_libraries

load_libraries()

from pagedkv.ops.attention import (  # noqa: E402
    merge_attention_states,
    paged_attention,
    paged_attention_workspace_size,
)
from pagedkv.ops.cache import (  # noqa: E402
    copy_blocks,
    fused_norm_rotary_reshape_and_cache,
    fused_rotary_reshape_and_cache,
    gather_blocks,
    reshape_and_cache,
    swap_blocks,
)
from pagedkv.ops.layers import (  # noqa: E402
    fused_add_rms_norm,
    gelu_and_mul,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pagedkv.ops.linear import streamed_linear  # noqa: E402
from pagedkv.ops.sampling import sample_tokens, score_tokens  # noqa: E402
from pagedkv.ops.step import advance_edits, advance_step  # noqa: E402

__all__ = [
    "advance_edits",
    "advance_step",
    "copy_blocks",
    "fused_add_rms_norm",
    "fused_norm_rotary_reshape_and_cache",
    "fused_rotary_reshape_and_cache",
    "gather_blocks",
    "gelu_and_mul",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_workspace_size",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample_tokens",
    "score_tokens",
    "silu_and_mul",
    "streamed_linear",
    "swap_blocks",
]
