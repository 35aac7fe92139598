"""Programs of users that call agents as models behind an address of OpenAI's and Anthropic's form. Imports no torch."""
