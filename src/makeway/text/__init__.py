"""Text in and out: tokenizer, chat template, incremental detokeniser, stop strings."""

from makeway.text.stream import Detokenizer, StopMatcher
from makeway.text.template import ChatTemplate
from makeway.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "Tokenizer"]
