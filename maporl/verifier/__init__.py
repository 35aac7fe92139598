"""Verifiers, models that score answers: making one, and asking one for scores, here or behind a server.

:mod:`maporl.verifier.command` makes one: it samples answers, balances them and trains. :mod:`maporl.verifier.source` is
the reward source of a run, :mod:`maporl.verifier.client` asks servers, and :mod:`maporl.verifier.section` has the
options (``reward.verifier``).
"""
