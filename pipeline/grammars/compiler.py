"""Grammars compiled against a target's vocabulary."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

from pipeline.errors import InvalidRequest, short
from pipeline.grammars.grammar import Grammar

CACHE_BYTES = 256 << 20
"""What compiled grammars may take before the least used are given up."""

MOST_THREADS = 8


MOST_PARSED = 256
"""Grammars that `check_grammar` remembers."""


@lru_cache(MOST_PARSED)
def check_grammar(grammar: Grammar) -> None:
    """See whether xgrammar takes a grammar, for which no target is needed.

    Raises:
        InvalidRequest: xgrammar isn't installed, or doesn't take the grammar: with its reason.
    """
    made = _xgrammar().Grammar
    parsers = {"json_schema": made.from_json_schema, "regex": made.from_regex, "ebnf": made.from_ebnf}
    _taken(parsers[grammar.kind], grammar)


class Compiler:
    """Compiles grammars for one target; equal ones once.

    The vocabulary that a grammar sees holds what a token adds to the text. Special tokens and ends of sequence add
    nothing, so no grammar allows them, whatever their names spell. Behind the last token stands one more, which no
    model has: it stands for the grammar's end, and `Walk` puts the request's own endings there.

    Args:
        target: `model_loaders.Target`, with a tokenizer.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def compile(self, grammar: Grammar) -> Any:
        """The compiled grammar, an `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequest: xgrammar isn't installed, or doesn't take the grammar: with its reason.
        """
        made = self._compiler
        compilers = {
            "json_schema": made.compile_json_schema,
            "regex": made.compile_regex,
            "ebnf": made.compile_grammar,
        }
        return _taken(compilers[grammar.kind], grammar)

    @cached_property
    def _compiler(self) -> Any:
        xgrammar = _xgrammar()
        target, tokenizer = self._target, self._target.tokenizer
        end = target.vocab_size
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=end, stop_token_ids=[0])
        added = getattr(tokenizer, "added_tokens_decoder", {})
        textless = {token for token, known in added.items() if known.special}
        textless |= {*tokenizer.all_special_ids, *target.eos_token_ids}
        vocabulary = [b"" if token in textless else text for token, text in enumerate(found.decoded_vocab)]
        vocabulary += [b""] * (end - len(vocabulary))
        info = xgrammar.TokenizerInfo(
            [*vocabulary, b""],
            xgrammar.VocabType.RAW,
            vocab_size=end + 1,
            stop_token_ids=[end],
            add_prefix_space=found.add_prefix_space,
        )
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)


def _taken(make: Callable[[str], Any], grammar: Grammar) -> Any:
    try:
        return make(grammar.source)
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"^\[[\d:]+\] \S+ ", "", str(error)).strip().splitlines()
        raise InvalidRequest(
            f"grammar={short(grammar.to_dict())}, expected one that xgrammar takes: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from None


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise InvalidRequest(
            f"grammar: xgrammar isn't usable ({error}), expected it installed: pip install 'specmask[grammar]'"
        ) from None
    return xgrammar
