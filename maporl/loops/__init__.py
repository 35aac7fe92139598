"""Outer loops: sample with the team, make a data set of its completions, train on it by TRL, evaluate, repeat.

A run of the loop is a folder, and every part of a round is a folder in it:

- ``initial/``: the weights with which the loop begins, warm start included.
- ``round-K/sample/``: ``dialogues.jsonl`` with token ids and credits, played with the weights of the round before.
- ``round-K/train-N/``: the N-th stage. ``POLICY.rows.jsonl`` is its data set, ``manifest.json`` has the counts and a
  hash of the rows, and ``POLICY/`` has the weights after the stage.
- ``round-K/evaluate/``: the team on held-out questions.

A folder appears under its name when it is complete, with a manifest of all its files, so a loop that was killed goes on
with the first folder that is missing. Nothing that is there is written again. Every part loads its weights from the
folder before it and has random numbers of its own, so a resumed loop ends as one that was not interrupted.

:mod:`maporl.loops.plan` checks the stages, :mod:`maporl.loops.builder` is the contract of what makes rows of dialogues,
:mod:`maporl.loops.shards` collects those of a stage over rounds, :mod:`maporl.loops.rows` counts and writes them,
and :mod:`maporl.loops.stages` trains on them. ``maporl.loops.run`` runs the whole, and measures each round.
:mod:`maporl.loops.sft` trains a team by supervision before PPO (``maporl sft``).
"""
