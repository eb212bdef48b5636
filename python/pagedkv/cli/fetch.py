"""`pagedkv fetch`: have a model on this machine before it is needed."""

from __future__ import annotations

from pagedkv.cli.options import Model


def fetch(model: Model) -> None:
    """Download a named model into the cache directory, check it, and print where it is.

    Example: pagedkv fetch smollm2
    """
    from pagedkv.weights import open_checkpoint

    print(open_checkpoint(model).path)
