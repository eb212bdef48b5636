"""Text: tokenizers, chat templates, and decoding of a growing stream. Knows no tensor, no model."""

from pagedkv.text.chat_template import ChatTemplate
from pagedkv.text.incremental import IncrementalDecoder, token_bytes
from pagedkv.text.loading import load_tokenizer
from pagedkv.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDecoder", "Tokenizer", "load_tokenizer", "token_bytes"]
