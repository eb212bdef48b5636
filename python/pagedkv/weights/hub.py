"""Models of the Hugging Face hub, by id: fetched into huggingface_hub's own cache, as safetensors.

Only the files that are read are fetched: no code, and never pickled weights.
"""

from __future__ import annotations

import re
from pathlib import Path

from pagedkv.weights.safetensors_directory import INDEX, SINGLE, shard_names

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
)


def is_hub_id(model: str) -> bool:
    """Whether a name has the form of an id, owner/name, and cannot leave a folder."""
    return _ID.fullmatch(model) is not None and ".." not in model


def fetch_from_hub(model: str) -> Path:
    """Have the model on this machine; returns its directory. Without a network what is in
    huggingface_hub's cache is used; HF_HOME, HF_TOKEN and HF_ENDPOINT are that library's.

    Raises:
        RuntimeError: it could not be fetched: why, in the library's words.
        ValueError: its index is malformed.
    """
    folder = _snapshot(model, None, _DESCRIPTIONS)
    shards = shard_names(folder / INDEX) if (folder / INDEX).exists() else [SINGLE]
    # Of the same commit, whatever happens to the model meanwhile: the folder's name.
    return _snapshot(model, folder.name, (*_DESCRIPTIONS, *shards))


def fetch_config_from_hub(model: str) -> Path:
    """Have the model's config.json on this machine and nothing else; returns its directory. Errors:
    as fetch_from_hub.
    """
    return _snapshot(model, None, ("config.json",))


def _snapshot(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    # Imported here: it takes long, and only those who fetch need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # of several libraries, by version
        lines = [*str(error).strip().splitlines(), "no reason given"]
        raise RuntimeError(
            f"no model {model!r}: there is no path of that name, and it could not be fetched from "
            f"the Hugging Face hub: {type(error).__name__}: {lines[0]}"
        ) from error
