"""The process in which untrusted snippets run; started by :mod:`maporl.rewards.sandbox`, never imported by it."""
