"""Agents as models behind an address of OpenAI's and Anthropic's form: those of programs, and trained ones."""
