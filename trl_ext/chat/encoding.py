"""Token-exact chat: a transcript grows by appending token ids, and sampled tokens are never tokenised again.

Rendering a whole conversation again at every turn may change tokens that the model itself produced: templates strip
reasoning, and tokenizers merge differently across a boundary. Here the first prompt is rendered once. Every later
prompt is the *suffix* that the template puts after an assistant message. It is tokenised alone and appended.
"""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from trl_ext.chat.control_tokens import Tokenizer, control_tokens, encode_pieces, new_mark
from trl_ext.chat.templates import TemplateFailed, render_template
from trl_ext.errors import UserError, one_line

Message = dict[str, Any]

FALLBACK_TEMPLATE = (
    "{{ bos_token if bos_token }}"
    "{% for message in messages %}"
    "{% set content = message.content | replace('\nUser:', '\n User:') | replace('\nAssistant:', '\n Assistant:') %}"
    "{% if message.role == 'system' %}{{ content }}\n\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ content }}{{ eos_token }}\n\n"
    "{% else %}User: {{ content }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""A chat template for base models without one: plain ``User:`` and ``Assistant:`` paragraphs that end with EOS.

These words are ordinary text, so a line of a message that begins with one of them is indented by a space.
"""

CONCATENATION_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The messages one after the other. An assistant message ends with EOS. Models that are built on the spot have it."""

OWN_TEMPLATES = (FALLBACK_TEMPLATE, CONCATENATION_TEMPLATE)
"""The templates of this package, which need no process of their own."""


class ChatError(UserError, ValueError):
    """A tokenizer or its chat template cannot render the conversations of a dialogue."""


class PromptTooLong(UserError, ValueError):
    """A prompt and its completion do not fit the model's context."""


def context_of(config: Any) -> int | None:
    """Return the context length, in tokens, of a model with this Hugging Face ``config``.

    It is None if the configuration does not give one.
    """
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_length(prompt: int, new: int, context: int | None, where: str, model: str, remedy: str) -> None:
    """Check that ``prompt`` tokens leave room for ``new`` more tokens in a context of ``context`` tokens.

    A context of None has no limit. The other arguments are for the error message: ``where`` names the prompt, ``model``
    names its reader, and ``remedy`` says what to do.

    Raises:
        PromptTooLong: the context is too short for both.
    """
    if context is not None and prompt + new > context:
        raise PromptTooLong(
            f"{where}: the prompt has {prompt} tokens and the completion may have {new}, but {model} reads at most "
            f"{context}; {remedy}"
        )


def check_tokenizer(tokenizer: Tokenizer, owner: str) -> None:
    """Check that ``tokenizer`` has an EOS token, a padding token and a chat template.

    Raises:
        ChatError: one of them is missing. ``owner`` says in the message whose tokenizer it is.
    """
    if tokenizer.eos_token_id is None:
        raise ChatError(f"{owner}: the tokenizer has no EOS token, so no completion could end; set tokenizer.eos_token")
    if tokenizer.pad_token_id is None:
        raise ChatError(f"{owner}: the tokenizer has no padding token; set tokenizer.pad_token, perhaps its EOS token")
    if not tokenizer.chat_template:
        raise ChatError(f"{owner}: the tokenizer has no chat template; set one, such as encoding.FALLBACK_TEMPLATE")


def render(
    tokenizer: Tokenizer,
    messages: list[Message],
    generate: bool = True,
    tools: list[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of ``messages`` by the chat template.

    ``generate`` adds the opening of the next assistant message. ``tools`` are the schemas of the tools that the model
    may call. ``options`` are what else the template reads, such as ``enable_thinking``.

    Raises:
        ChatError: the template is not valid, refuses the messages, or takes too much time or memory.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, and none for chats
        raise ChatError(f"{tokenizer.name_or_path!r}: {one_line(error, 200)}; set one chat template") from None
    if template in OWN_TEMPLATES:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    try:
        return render_template(template, messages, generate, {**tokenizer.special_tokens_map, **(options or {})}, tools)
    except TemplateFailed as error:
        roles = ", ".join(message["role"] for message in messages[:4])
        raise ChatError(f"the chat template of {tokenizer.name_or_path!r} cannot render {roles} ({error})") from None


def _marked(
    tokenizer: Tokenizer,
    messages: list[Message],
    mark: str,
    generate: bool,
    tools: list[dict[str, Any]] | None = None,
    before: Sequence[Message] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of ``messages`` with ``mark`` at every place where a control token must be cut.

    Many templates want the roles to alternate, and group chats have several messages of a role one after the other. If
    the template refuses them, they are one message, with an empty line between them. ``before`` stands before the
    messages as it is.

    Raises:
        ChatError: the template cannot render them.
    """
    marked = control_tokens(tokenizer).marked(messages, mark)
    try:
        return render(tokenizer, [*before, *marked], generate, tools, options)
    except ChatError as refusal:
        if len(alternating := _alternating(messages)) == len(messages):
            raise
        try:
            return _marked(tokenizer, alternating, mark, generate, tools, before, options)
        except ChatError:
            raise refusal from None


def with_names(tokenizer: Tokenizer, messages: list[Message]) -> list[Message]:
    """Return ``messages`` with the ``name`` of who says each before its text, unless the chat template shows names.

    The name of a result is that of its tool, and stays.
    """
    named = [message["role"] != "tool" and "name" in message for message in messages]
    if not any(named):
        return messages
    mark = new_mark()
    roles = [{"role": role, "content": ".", "name": mark} for role in ("user", "assistant")]
    if render(tokenizer, roles, False).count(mark) == len(roles):
        return messages
    written = [{**one, "content": f"{one.get('name')}: {one['content']}"} for one in messages]
    return [new if has else old for has, new, old in zip(named, written, messages, strict=True)]


def _alternating(messages: list[Message]) -> list[Message]:
    """Return ``messages`` with neighbours of one role as one message. Calls and results stay as they are."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        plain = message["role"] != "tool" and all(isinstance(one.get("content"), str) for one in (last, message))
        if plain and last["role"] == message["role"] and not ("tool_calls" in last or "tool_calls" in message):
            merged[-1] = {"role": last["role"], "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[Message],
    generate: bool = False,
    tools: list[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of ``messages`` as the chat template writes them, with the schemas of ``tools`` if given.

    Only the template writes control tokens. A message that spells one is encoded as text
    (:mod:`trl_ext.chat.control_tokens`). ``generate`` adds the opening of the next assistant message.
    """
    mark = new_mark()
    # the template writes the special tokens itself
    return encode_pieces(tokenizer, _marked(tokenizer, messages, mark, generate, tools, (), options).split(mark))


class RenderedChat(str):
    """A conversation as a chat template writes it.

    Its ``pieces`` are encoded apart, so that no message writes a control token.
    """

    pieces: list[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, messages: list[Message]) -> "RenderedChat":
        """Return ``messages`` in the chat template of ``tokenizer``, or in plain paragraphs if it has none.

        Raises:
            ChatError: the template cannot render them.
        """
        mark = new_mark()
        if tokenizer.chat_template:
            written = _marked(tokenizer, messages, mark, generate=False)
        else:
            marked = control_tokens(tokenizer).marked(messages, mark)
            written = tokenizer.apply_chat_template(marked, chat_template=FALLBACK_TEMPLATE, tokenize=False)
        chat = cls(written.replace(mark, ""))
        chat.pieces = written.split(mark)
        return chat


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, special tokens included.

    A token that ends within a character adds the empty text. The token that completes the character adds all of it.
    """
    texts: list[str] = []
    # ids[before:done] are decoded together with the next token, because some tokenizers join words by their context
    before = done = 0
    for end in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[before:done], clean_up_tokenization_spaces=False)
        text = tokenizer.decode(ids[before:end], clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        before, done = done, end
    return texts


def encode_prompt(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a new conversation, up to the opening of the model's next message."""
    return encode_chat(tokenizer, messages, True, tools, options)


@dataclass(frozen=True)
class TurnEnd:
    """How a chat template ends an assistant message.

    Args:
        ids: what ends the last message of a conversation, up to the control token that does: it ends what is sampled,
            and what is taught. Empty if the template writes no control token there.
        closing: the control token with which the template closes an earlier message, or None if the next message's
            marker comes right after the words, as in GLM-4, where that marker ends the message.
    """

    ids: tuple[int, ...]
    closing: int | None


_turn_ends: WeakKeyDictionary = WeakKeyDictionary()


def turn_end(tokenizer: Tokenizer) -> TurnEnd:
    """Return how the chat template of ``tokenizer`` ends an assistant message.

    EOS ends it without a template, and with one that does not render an assistant message.
    """
    template, known = tokenizer.chat_template, _turn_ends.get(tokenizer)
    if known is None or known[0] != template:
        _turn_ends[tokenizer] = known = (template, _turn_end(tokenizer))
    return known[1]


def _turn_end(tokenizer: Tokenizer) -> TurnEnd:
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if not tokenizer.chat_template:
        return TurnEnd(eos, tokenizer.eos_token_id)
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    control |= {*tokenizer.all_special_ids}
    last, opened = (_after_message(tokenizer, [], generate) for generate in (False, True))
    followed = _after_message(tokenizer, [{"role": "user", "content": "."}], False)
    ended = _to_first(tokenizer, control, last)
    if not ended:
        return TurnEnd(_to_first(tokenizer, control - {tokenizer.bos_token_id}, followed) or eos, None)
    both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(followed, opened or last, strict=False))
    closed = _to_first(tokenizer, control, [number for number, _ in both])
    return TurnEnd(ended, closed[-1] if closed else None)


def _after_message(tokenizer: Tokenizer, messages: list[Message], generate: bool) -> list[int]:
    """Return what the template writes after an assistant message that ``messages`` follow. Empty if it refuses them."""
    said = new_mark()
    before: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": said}]
    try:
        _, shown, suffix = render(tokenizer, [*before, *messages], generate).rpartition(said)
    except ChatError:
        return []
    return encode_pieces(tokenizer, [suffix]) if shown else []


def _to_first(tokenizer: Tokenizer, some: Collection[int], ids: Sequence[int]) -> tuple[int, ...]:
    """Return ``ids`` up to the first of ``some`` tokens, or nothing if anything but blanks stands before it."""
    place = next((place for place, number in enumerate(ids) if number in some), None)
    if place is None or tokenizer.decode(ids[:place]).strip():
        return ()
    return tuple(ids[: place + 1])


def encode_continuation(
    tokenizer: Tokenizer, messages: list[Message], end: int | None, stop_ids: frozenset[int] | set[int]
) -> list[int]:
    """Return the token ids that continue a conversation after a sampled assistant message.

    They hold the closing of that message, then ``messages``, then the opening of the model's next message. ``end`` is
    the token of ``stop_ids`` with which the sampled message ends already, or None. What the template writes to close
    the message is left out after it, and so is the marker of the next message where it is this token. A message that
    was cut by length is closed here. The closing tokens are context and are never trained on.

    Messages of the role ``tool`` at the beginning are the results of the calls in the sampled message.

    Raises:
        ChatError: the template does not show earlier assistant messages or results.
    """
    sampled, mark = new_mark(), new_mark()  # the first stands for the sampled message
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
    if results:
        suffix = _after_calls(tokenizer, [result["name"] for result in results], messages, mark, sampled, stop_ids)
        return _without_closing(tokenizer, encode_pieces(tokenizer, suffix.split(mark)), end, stop_ids)
    before: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": sampled}]
    rendered = _marked(tokenizer, messages, mark, True, before=before)
    _, shown, suffix = rendered.rpartition(sampled)
    if not shown:
        raise ChatError(
            f"the chat template of {tokenizer.name_or_path!r} does not show earlier assistant messages, "
            "so a dialogue of several turns cannot be continued; use another template"
        )
    return _without_closing(tokenizer, encode_pieces(tokenizer, suffix.split(mark)), end, stop_ids)


def _without_closing(
    tokenizer: Tokenizer, ids: list[int], end: int | None, stop_ids: frozenset[int] | set[int]
) -> list[int]:
    """Return what follows a message without what closes it, if it has its ``end``."""
    if end is None:
        return ids
    closing = turn_end(tokenizer).closing
    return ids[len(_to_first(tokenizer, {end} if closing is None else {end, closing, *stop_ids}, ids)) :]


def _after_calls(
    tokenizer: Tokenizer,
    names: list[str],
    messages: list[Message],
    mark: str,
    sampled: str,
    stop_ids: frozenset[int] | set[int],
) -> str:
    """Return what the template writes after calls of ``names`` (arguments: ``sampled``), closing included."""
    # the messages begin with the results of the calls
    rendered = _with_calls(tokenizer, names, messages, mark, sampled)
    _, shown, after = rendered.rpartition(sampled)
    stops = [str(word) for word in tokenizer.convert_ids_to_tokens(sorted(stop_ids))]
    places = [place for word in stops if (place := after.find(word)) >= 0]
    if not shown or not places:
        raise ChatError(
            f"the chat template of {tokenizer.name_or_path!r} does not end a call with any of the tokens {stops}, so a "
            "completion cannot be continued with its result; use call_format: json, or add the template's token to "
            "ppo.stop_token_id"
        )
    return after[min(places) :]


def _with_calls(tokenizer: Tokenizer, names: list[str], messages: list[Message], mark: str, argument: str) -> str:
    """Return a conversation in which the assistant calls tools of these ``names``, and ``messages`` follow."""
    kinds: list[Any] = [{"argument": argument}, json.dumps({"argument": argument}, ensure_ascii=False)]
    for arguments in kinds:  # some templates want arguments as text
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
        called: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            rendered = _marked(tokenizer, messages, mark, True, before=[{"role": "user", "content": "."}, called])
        except ChatError:
            if arguments is kinds[-1]:
                raise
            continue
        if rendered.count(argument) == len(names):
            return rendered
    return ""
