"""What a server accepts and how long it waits: one frozen value, from the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client can ask for.

    Args:
        max_body_bytes: of a request's body. A prompt of 128,000 tokens fits into the default, as
            text or as ids; parsing four times as much would hold everybody up for too long.
        max_held_bytes: of the bodies of all requests that are being answered; more are refused with
            status 429.
        max_header_bytes: of all headers of a request together.
        body_timeout_s: for a body to arrive.
        max_connections: at a time; beyond, that one goes which has waited the longest without
            sending a whole request. Fewer where the process may open fewer files.
        request_timeout_s: from a request's arrival to the end of its answer.
        max_queue: prompts that may wait beyond those that can run at once (max_num_seqs); more are
            refused with status 429.
        max_answers: sequences that one request may ask for: prompts times n, best_of or beams.
        max_logprobs: tokens told beside each token, at most 20.
        max_request_tokens: sequences times max_tokens of one request; None: 64 times
            max_model_len.
        max_keep_s: for which an answer can be kept to be forked.
        max_kept: answers kept at a time; the oldest go before their time.
        stall_s: /health turns red when a step has run for so long.
        drain_s: for answers to end when the server is told to stop.
    """

    max_body_bytes: int = 2**20
    max_held_bytes: int = 2**28
    max_header_bytes: int = 16 * 2**10
    body_timeout_s: float = 30.0
    max_connections: int = 4096
    request_timeout_s: float = 600.0
    max_queue: int = 1024
    max_answers: int = 128
    max_logprobs: int = 20
    max_request_tokens: int | None = None
    max_keep_s: float = 600.0
    max_kept: int = 256
    stall_s: float = 120.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_body_bytes", 1),
            ("max_held_bytes", 1),
            ("max_header_bytes", 1),
            ("max_connections", 1),
            ("max_queue", 0),
            ("max_answers", 1),
            ("max_logprobs", 0),
            ("max_kept", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_request_tokens is not None and self.max_request_tokens < 1:
            raise ValueError(
                f"max_request_tokens must be at least 1, got {self.max_request_tokens}"
            )
        for name in ("body_timeout_s", "request_timeout_s", "max_keep_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must be at least 0, got {self.drain_s}")
