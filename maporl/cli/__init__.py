"""The command line: one module for each group of commands; :mod:`maporl.cli.main` puts them together."""
