"""Checks before a run starts. :func:`maporl.validation.load.load` reads a configuration and checks it."""
