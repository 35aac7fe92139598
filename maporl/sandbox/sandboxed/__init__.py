"""The process in which untrusted snippets run; started by :mod:`maporl.sandbox.sandbox`, never imported by it."""
