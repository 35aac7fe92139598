"""Programs of users that call agents as models behind an OpenAI-compatible address. Imports no torch."""
