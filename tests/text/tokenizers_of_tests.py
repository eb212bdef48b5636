"""Small tokenizers, trained here on a few lines: byte-level like GPT-2's, and one with byte
fallback like Llama 2's.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

LINES = [
    "the cat sat on the mat, and the dog sat on the log",
    "日本語のテキスト 日本語",
    "emoji 😀 😀 🌊 👩‍👩‍👧‍👦 and naïve café déjà vu",
    "Привет, мир! Привет",
    "def f(x):\n    return x  # 12345",
] * 4
SPECIAL = ["<|start|>", "<|end|>", "<|end|>x"]
TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "the dog sat",
    "日本語 and 海🌊",
    "👩‍👩‍👧‍👦😀",
    "naïve café\n\n\tx",
    "a\u0301 combining",
    "\u0000\u0001\u007f",
    "\U0010ffff\ufdd0",
    "zürich <|end|> straße",
]


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(LINES, trainer)
    add_special(backend)
    # Added tokens: of letters that also stand for bytes, and of others.
    backend.add_tokens([AddedToken("straße", normalized=False), AddedToken("zü rich")])
    return backend


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """strips: a text begins with a space that decoding takes away again, as Llama 2's does."""
    learner = Tokenizer(models.BPE())
    prepend = normalizers.Prepend("▁")
    spaces = normalizers.Replace(" ", "▁")
    learner.normalizer = normalizers.Sequence([prepend, spaces])
    learner.train_from_iterator(LINES[:3], BpeTrainer(vocab_size=160, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([prepend, spaces]) if strips else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    add_special(backend)
    return backend


def metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(LINES, BpeTrainer(vocab_size=300, show_progress=False))
    add_special(backend)
    return backend


def add_special(backend: Tokenizer) -> None:
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])


BACKENDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, no strip": lambda: byte_fallback(strips=False),
    "metaspace": metaspace,
}


def saved(backend: Tokenizer, folder: Path, **settings: object) -> Path:
    """A model directory with this tokenizer; settings go into tokenizer_config.json."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
