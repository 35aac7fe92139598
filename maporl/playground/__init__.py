"""Tiny models that learn toys: tasks and warm starts, for tests and first steps. No download.

Toy tasks make their questions (:mod:`~maporl.playground.arithmetic`, :mod:`~maporl.playground.skills`), and write what
a random model is to learn of them (:class:`maporl.Lessons`). A teacher plays the protocol and says it
(:mod:`~maporl.playground.teacher`), which is asked beforehand whether it can, and :mod:`~maporl.playground.warm_start`
trains on what it said. :mod:`maporl.methods.tiny_versions` makes any recipe small enough for this. The random models
themselves are built on a lower layer, in :mod:`maporl.tiny`, because teams and verifiers load them by name as any other
model.
"""
