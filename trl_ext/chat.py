"""Token-exact chat: a transcript grows by appending ids, and what was sampled is never tokenised again.

Re-rendering a whole conversation at every turn may change tokens the model itself produced (templates strip
reasoning, tokenizers merge differently across a boundary). Here the first prompt is rendered once; every later one is
the *suffix* that the template puts after an assistant message, tokenised alone and appended.
"""

from typing import Any

from trl_ext.errors import UserError

Message = dict[str, str]
Tokenizer = Any  # PreTrainedTokenizerBase; kept loose so that this module imports without transformers

FALLBACK_TEMPLATE = (
    "{{ bos_token if bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n\n"
    "{% else %}User: {{ message.content }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For base models without a chat template: plain ``User:`` and ``Assistant:`` paragraphs, ended by EOS."""

_MARK = "maporl-mark-7c1f"  # stands for the assistant's words while the suffix is cut out of a rendered template


class ChatError(UserError, ValueError):
    """A tokenizer, or its chat template, that no dialogue can be written with."""


class PromptTooLong(UserError, ValueError):
    """A prompt and its answer do not fit the model's context."""


def context_of(config: Any) -> int | None:
    """Most tokens that a model with this Hugging Face ``config`` reads; None where the configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_length(prompt: int, new: int, context: int | None, where: str, model: str, remedy: str) -> None:
    """Check that a prompt of ``prompt`` tokens leaves room for ``new`` more in ``context`` tokens (None: no bound).

    The other arguments are for the error: ``where`` names the prompt, ``model`` who reads it, ``remedy`` what to do.

    Raises:
        PromptTooLong: the context is too short for both.
    """
    if context is not None and prompt + new > context:
        raise PromptTooLong(
            f"{where}: the prompt has {prompt} tokens and the answer may have {new}, but {model} reads at most "
            f"{context}; {remedy}"
        )


def check_tokenizer(tokenizer: Tokenizer, owner: str) -> None:
    """Check that ``tokenizer`` can serve: it needs an EOS token, a padding token and a chat template.

    Raises:
        ChatError: it lacks one of them; ``owner`` says whose tokenizer it is.
    """
    if tokenizer.eos_token_id is None:
        raise ChatError(
            f"{owner}: the tokenizer has no EOS token, so an answer could never end; set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        raise ChatError(
            f"{owner}: the tokenizer has no padding token; set tokenizer.pad_token "
            "(tokenizer.pad_token = tokenizer.eos_token is fine here: masks are never inferred from ids)"
        )
    if not tokenizer.chat_template:
        raise ChatError(
            f"{owner}: the tokenizer has no chat template; set tokenizer.chat_template "
            "(trl_ext.chat.FALLBACK_TEMPLATE suits base models)"
        )


def render(tokenizer: Tokenizer, messages: list[Message], generate: bool = True) -> str:
    """The template's text for ``messages``; ``generate`` adds the opening of the next assistant message."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def encode_prompt(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Ids of a fresh conversation, ready for the model to speak. Templates write special tokens themselves."""
    return tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)


def encode_continuation(
    tokenizer: Tokenizer, messages: list[Message], ended: bool, stop_ids: frozenset[int] | set[int]
) -> list[int]:
    """Ids to append after a sampled assistant message so that ``messages`` follow and the model speaks again.

    ``ended`` says that the sampled message already closes with a token of ``stop_ids``; then the template's own
    closing token is not repeated. A message cut by length is closed here, by tokens that are context and never
    trained on.

    Raises:
        ChatError: the template does not show earlier assistant messages.
    """
    rendered = render(tokenizer, [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *messages])
    cut = rendered.rfind(_MARK)
    if cut < 0:
        raise ChatError(
            f"the chat template of {tokenizer.name_or_path!r} does not show earlier assistant messages, "
            "so a dialogue of several turns cannot be continued; use another template"
        )
    ids = tokenizer.encode(rendered[cut + len(_MARK) :], add_special_tokens=False)
    if ended and ids and ids[0] in stop_ids:
        return ids[1:]
    return ids
