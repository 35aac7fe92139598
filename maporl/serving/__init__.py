"""Agents as models behind an address with OpenAI's and Anthropic's APIs: those of programs, and trained ones."""
