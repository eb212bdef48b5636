"""What a request wants done to its logits before a token is chosen: SamplingParams, brought into
arrays once, when the request gets a slot. edits.py makes of it what the sampler changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import PENDING
from pagedkv.request import Request
from pagedkv.sampling_params import LogitsProcessor, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """Ids are int64 [n], each once, and those of one request. bias float32 [n]: of bias_ids.
    bad_ids: what is forbidden anywhere. bad_behind: from a token to sequences that go on with it
    just before their last token, which is forbidden behind all others: a step looks only at those
    of its last token, however many there are. stop_ids: what is forbidden before min_tokens.
    vocab_size: ids that have a logit; a prompt may hold others.
    """

    request_id: str
    prompt_len: int
    params: SamplingParams
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    allowed_ids: NDArray[np.int64]
    bad_ids: NDArray[np.int64]
    bad_behind: Mapping[int, Sequence[NDArray[np.int64]]]
    stop_ids: NDArray[np.int64]
    vocab_size: int

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> LogitRules | None:
        """None where the logits stay as they are. vocab_size: ids that have a logit."""
        params = request.sampling_params
        if not params.changes_logits:
            return None
        pairs = params.logit_bias_pairs
        bad_behind: dict[int, list[NDArray[np.int64]]] = {}
        # As a prompt, a word's spelling may have ids without a logit.
        bad_token_ids = [ids for ids in request.bad_token_ids if ids[-1] < vocab_size]
        for ids in bad_token_ids:
            if len(ids) > 1:
                bad_behind.setdefault(ids[-2], []).append(np.array(ids, dtype=np.int64))
        alone = [ids[0] for ids in bad_token_ids if len(ids) == 1]
        stops = np.array(request.stop_token_ids if params.min_tokens else (), dtype=np.int64)
        return cls(
            request_id=request.request_id,
            prompt_len=request.prompt_len,
            params=params,
            bias_ids=np.array([token_id for token_id, _ in pairs], dtype=np.int64),
            bias=np.array([bias for _, bias in pairs], dtype=np.float32),
            allowed_ids=np.unique(np.array(params.allowed_token_ids or (), dtype=np.int64)),
            bad_ids=np.unique(np.array(alone, dtype=np.int64)),
            bad_behind=bad_behind,
            # An end-of-sequence token may lie in the padding of the vocabulary.
            stop_ids=stops[stops < vocab_size],
            vocab_size=vocab_size,
        )

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        return tuple(self.params.logits_processors)

    @property
    def lifted_at(self) -> int:
        """Tokens of the sequence from which on its stop ids are allowed; 0: they always are."""
        return self.prompt_len + self.params.min_tokens if self.stop_ids.size else 0

    def seen(self, token_ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of prompt and answer that have a logit, each once, and how often they stand in
        the answer; without the last token while it is PENDING.

        Args:
            token_ids: [num_tokens], the request's tokens so far, prompt first.
        """
        known = token_ids[:-1] if token_ids[-1] == PENDING else token_ids
        ids, places = np.unique(known, return_inverse=True)
        counts = np.bincount(places[self.prompt_len :], minlength=ids.size)
        end = int(np.searchsorted(ids, self.vocab_size))
        return ids[:end].astype(np.int64), counts[:end]

    def forbidden(self, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Ids that may not come next, behind token_ids [num_tokens]."""
        output_ids = token_ids[self.prompt_len :]
        found = [self.bad_ids]
        if output_ids.size:
            found += [
                ids[-1:]
                for ids in self.bad_behind.get(int(output_ids[-1]), ())
                if ids.size <= output_ids.size + 1
                and np.array_equal(output_ids[output_ids.size + 1 - ids.size :], ids[:-1])
            ]
        if output_ids.size < self.params.min_tokens:
            found.append(self.stop_ids)
        return np.unique(np.concatenate(found))
