"""The grammars that a test compiles."""

import pytest
import xgrammar


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Source and bytes of each grammar, in the order in which they are compiled."""
    found: list[tuple[str, int]] = []
    compile_grammar = xgrammar.GrammarCompiler.compile_grammar

    def noted(self, source):
        grammar = compile_grammar(self, source)
        found.append((str(source), grammar.memory_size_bytes))
        return grammar

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_grammar", noted)
    return found
