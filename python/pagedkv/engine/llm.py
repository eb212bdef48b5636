"""`LLM`: a list of prompts in, a list of outputs out, with a progress bar."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.requests import Prompt
from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams
from pagedkv.text import Tokenizer

Message = Mapping[str, str]


class LLM:
    """A model ready to answer lists of prompts.

    Args:
        model: the alias `smollm2`, a directory of safetensors, a .gguf file, or an id of the
            Hugging Face hub.
        options: of EngineConfig and its parts, flat: dtype, max_model_len, block_size,
            max_num_seqs, num_gpu_blocks_override, ...

    Example::

        llm = LLM("smollm2")
        outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
        print(outputs[0].outputs[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = Engine.from_config(EngineConfig.from_options(model, **options))
        self._names = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None  # a loaded checkpoint always has one
        return tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; outputs come in their order.

        Args:
            prompts: a text, a list of token ids, or a list of these.
            sampling_params: one for all, or one for each. None: the defaults.
            use_tqdm: show a progress bar on the terminal.
            cache_salt: share cached prefixes only with requests of the same salt.
            priority: one for each prompt, lower is more urgent; needs scheduling_policy "priority".

        Returns:
            one RequestOutput per prompt; one that failed has finish_reason "error" and says why.

        Raises:
            ValueError, TypeError: something is wrong with one of them; none was run then.
        """
        if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise TypeError(
                "prompts must be a text, a list of token ids, or a list of these, "
                f"got {type(prompts).__name__} {prompts!r}"
            )
        batch = [prompts] if _is_single(prompts) else list(prompts)
        params = _params_for(len(batch), sampling_params)
        return self._run(
            batch,
            [None] * len(batch),
            params,
            use_tqdm=use_tqdm,
            cache_salt=cache_salt,
            priorities=priority,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template. Special
        tokens that a message spells out are plain text.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if is_one else list(messages)
        texts = [self.tokenizer.apply_chat_template(one) for one in conversations]
        prompts = [self.tokenizer.encode_chat(one) for one in conversations]
        params = _params_for(len(texts), sampling_params)
        return self._run(prompts, texts, params, use_tqdm=use_tqdm, cache_salt=cache_salt)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix. Returns how many blocks were findable."""
        return self.engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Sequence[Any],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        cache_salt: str | None,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if priorities is None:
            priorities = [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(priorities)} priorities: give one each"
            )
        requests = [
            self.engine.make_request(
                str(next(self._names)),
                prompt,
                one,
                prompt_text=text,
                cache_salt=cache_salt,
                priority=priority,
            )
            for prompt, text, one, priority in zip(prompts, texts, params, priorities, strict=True)
        ]
        outputs: dict[str, RequestOutput] = {}
        try:
            with _progress(enabled=use_tqdm) as bar:
                task = bar.add_task("answering", total=len(requests))
                # All come back together, so those that may take longest begin first: at the end no
                # few long answers are left, for which a step costs as much as for many.
                for request in sorted(requests, key=lambda one: -one.max_tokens):
                    self.engine.add(request)
                while self.engine.has_work:
                    finished = self.engine.step().finished
                    outputs |= {output.request_id: output for output in finished}
                    bar.advance(task, len(finished))
        finally:
            for request in requests:  # an interrupt leaves nothing behind
                self.engine.abort(request.request_id)
        return [outputs[request.request_id] for request in requests]


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt: a text, or token ids."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))


def _params_for(
    num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling params: give one each")
    return list(params)


def _progress(*, enabled: bool) -> Progress:
    """A bar on standard error, so that standard output stays the caller's; gone when done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
        transient=True,
    )
