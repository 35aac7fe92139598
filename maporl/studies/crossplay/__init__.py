"""Cross-play: seat agents of different runs together, and evaluate every team. ``maporl crossplay`` calls it.

:func:`maporl.studies.crossplay.entrants.read_entrants` reads the runs and checks that their agents can play together.
:func:`maporl.studies.crossplay.play.play_crossplay` plays the teams, whose agents a pool loads and drops. What the
numbers are is in :mod:`maporl.studies.crossplay.result`, and how they are told and drawn in
:mod:`maporl.report.findings`, because the page of every run shows them.
"""
