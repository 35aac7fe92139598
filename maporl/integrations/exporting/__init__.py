"""Write a trained team for another server: what ``maporl export --for`` does.

:mod:`.models` says which models a team has and how each answers, :mod:`.template` puts an agent's system prompt into a
chat template, :mod:`.folders` writes weights, tokenizers and sampling, and :mod:`.serving` the command and the page.
:mod:`.agents` is copied beside them: vLLM loads it, and it imports nothing of this package.
"""
