"""Templates that want the roles to alternate read group chats too, and conversations go on token by token."""

import pytest
from chat_models import gemma, trl_template

from maporl.engines.transcript import Transcript
from trl_ext.chat.encoding import ChatError, RenderedChat, encode_continuation, encode_prompt, with_names

STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As Gemma's own template: it refuses what does not alternate."""


def strict(template=STRICT):
    tokenizer = gemma()
    tokenizer.chat_template = template
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", [None, "gemma", "gemma3"])
def test_neighbours_of_one_role_are_one_message_where_the_template_refuses_them(name):
    tokenizer = strict(STRICT if name is None else trl_template(name))
    chat = [user("Ann: 3"), user("Bob: 4"), assistant("So"), assistant("7"), user("and?")]
    assert RenderedChat.of(tokenizer, chat) == (
        "<bos><start_of_turn>user\nAnn: 3\n\nBob: 4<end_of_turn>\n<start_of_turn>model\nSo\n\n7<end_of_turn>\n"
        "<start_of_turn>user\nand?<end_of_turn>\n"
    )
    assert encode_prompt(tokenizer, chat[:2]) == encode_prompt(tokenizer, [user("Ann: 3\n\nBob: 4")])


def test_a_template_that_takes_them_is_given_them_apart():
    chat = [user("Ann: 3"), user("Bob: 4")]
    apart = "<bos><start_of_turn>user\nAnn: 3<end_of_turn>\n<start_of_turn>user\nBob: 4<end_of_turn>\n"
    assert RenderedChat.of(gemma(), chat) == apart


NAMED = "{% for m in messages %}<{{ m.get('name') or m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (STRICT, ["Ann: 3", "Bob: 4", "So", "Ann: 7", "2"]),
        (NAMED, ["3", "4", "So", "7", "2"]),
        (NAMED.replace("m.get('name') or", ""), ["Ann: 3", "Bob: 4", "So", "Ann: 7", "2"]),
    ],
    ids=["refuses neighbours", "shows names", "shows roles"],
)
def test_names_of_speakers_stand_in_their_texts_where_the_template_shows_none(template, shown):
    chat = [{**user("3"), "name": "Ann"}, {**user("4"), "name": "Bob"}, user("So"), {**assistant("7"), "name": "Ann"}]
    chat.append({"role": "tool", "content": "2", "name": "add"})
    tokenizer = strict(template)
    assert [message["content"] for message in with_names(tokenizer, chat)] == shown
    prompt = Transcript().add_messages(chat[:2], tokenizer, frozenset())
    assert prompt == encode_prompt(tokenizer, chat[:2] if template == NAMED else [user(text) for text in shown[:2]])
    assert RenderedChat.of(tokenizer, chat[:2]) == "<Ann>3<Bob>4" or template != NAMED


def test_a_conversation_goes_on_with_several_messages_after_what_was_sampled():
    tokenizer = strict()
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]))
    transcript = Transcript()
    first = transcript.add_messages([user("How many?"), user("Quick!")], tokenizer, stops)
    said = [*tokenizer.encode("15", add_special_tokens=False), *tokenizer.encode("<end_of_turn>")[-1:]]
    transcript.add_completion(0, said, ended=True)
    second = transcript.add_messages([user("Ann: 3"), user("Bob: 4")], tokenizer, stops)
    whole = [user("How many?\n\nQuick!"), assistant("15"), user("Ann: 3\n\nBob: 4")]
    assert second[: len(first) + len(said)] == first + said
    assert tokenizer.decode(second) == tokenizer.decode(encode_prompt(tokenizer, whole))
    rest = encode_continuation(tokenizer, whole[2:], said[-1], stops)
    assert second[len(first) + len(said) :] == rest


def test_what_was_sampled_is_not_joined_with_what_another_one_says_as_assistant():
    with pytest.raises(ChatError, match="cannot render user, assistant, assistant"):
        encode_continuation(strict(), [assistant("Bob: 4")], 1, frozenset())


def test_a_spelling_of_a_control_token_stays_text_in_a_joined_message():
    tokenizer = strict()
    ids = encode_prompt(tokenizer, [user("Ann <end_of_turn>"), user("Bob")])
    assert ids.count(tokenizer.convert_tokens_to_ids("<end_of_turn>")) == 1


def test_results_of_calls_stay_apart():
    template = STRICT.replace("(m.role == 'user') != (loop.index0 % 2 == 0)", "messages | length == 3")
    results = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    with pytest.raises(ChatError, match="cannot render user, tool, tool"):
        encode_prompt(strict(template), [user("a"), *results])
