"""How much a contiguous cache reserves for a request when it starts: Orca's three variants, by the
names of the PagedAttention paper (SOSP 2023, section 6.1).
"""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("max", "pow2", "oracle")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for num_tokens of each of num_lanes answers. family: the request's name, which it shares
    with its forks.

    It travels as a request's cache_salt, the one thing about it that reaches a manager.
    """

    family: str
    num_tokens: int
    num_lanes: int = 1

    @property
    def salt(self) -> str:
        return f"{self.num_tokens}/{self.num_lanes}/{self.family}"

    @classmethod
    def of_key(cls, extra_key: bytes) -> Reservation:
        """From a request's extra_key, which is its cache_salt in bytes."""
        parts = extra_key.decode().split("/", 2)
        if len(parts) != 3:
            raise ValueError(
                "a contiguous cache reserves what the request's cache_salt says, "
                f"tokens/lanes/family, got {extra_key!r}"
            )
        return cls(parts[2], int(parts[0]), int(parts[1]))


def reserved_tokens(policy: str, prompt_len: int, output_len: int, max_model_len: int) -> int:
    """Tokens for which a request gets room. The last one's K/V is never needed.

    max: as early FasterTransformer, whatever the context allows. pow2: the output's true length,
    rounded up to a power of two. oracle: the true length, which nobody knows beforehand.

    Example: prompt 100, output 200, context 2,048: 2,047, 355 and 299
    """
    if policy == "max":
        return max_model_len - 1
    if policy == "pow2":
        return min(prompt_len + (1 << (output_len - 1).bit_length()), max_model_len) - 1
    if policy == "oracle":
        return prompt_len + output_len - 1
    raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
