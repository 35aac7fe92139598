"""Configurations that are trained over the same seeds and compared. ``maporl compare`` and ``sharing`` call it."""
