"""The marks around what models think. Readers of calls, graders and replies share them. Imports nothing."""

THINKING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "to=self<|message|>": "<|eo",
}
"""The marks around what a model thinks."""
END_OF_MESSAGE = "<|eo"
"""The end of thinking that is a message to oneself. Elsewhere it ends any message."""
THOUGHT_ENDS = sorted(set(THINKING.values()) - {END_OF_MESSAGE})
"""The marks that end nothing but a thought."""


def end_of_begun_thought(prefix: str) -> str:
    """Return the mark that ends the thought which the end of a prompt has begun, or "".

    The templates of some models end prompts with ``<think>``. What the model says is then thinking up to ``</think>``.

    >>> end_of_begun_thought("2+2=<think>\\n"), end_of_begun_thought("<think>4</think>2+2=")
    ('</think>', '')
    """
    told = prefix.rstrip()
    for mark, end in THINKING.items():
        if told.endswith(mark):
            return end
    return ""
