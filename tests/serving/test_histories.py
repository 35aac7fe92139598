"""Which conversation a request goes on with."""

from maporl.serving.histories import Histories
from maporl.serving.wire import ChatRequest

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def asked(*messages, agent="ann", schemas=()):
    return ChatRequest(agent, messages, schemas)


def known(*pairs):
    """Histories in which each request was answered with a text, by utterances 0, 1, 2 and so on."""
    histories = Histories()
    for number, (request, reply) in enumerate(pairs):
        histories.add(request, message("assistant", reply), number)
    return histories


HELLO = message("user", "hello")


def test_two_conversations_of_one_agent_stay_apart_and_one_may_go_on_twice():
    other = message("user", "good evening")
    histories = known((asked(HELLO), "hi"), (asked(other), "hi"))
    one = asked(HELLO, message("assistant", "hi"), message("user", "1"))
    two = asked(HELLO, message("assistant", "hi"), message("user", "2"))
    three = asked(other, message("assistant", "hi"), message("user", "1"))
    assert [histories.place(request).after for request in (one, two, three)] == [0, 0, 1]


def test_another_agent_or_other_tools_begin_a_new_conversation():
    histories = known((asked(HELLO), "hi"))
    more = (HELLO, message("assistant", "hi"), message("user", "and?"))
    assert histories.place(asked(*more, agent="bob")).after is None
    tools = histories.place(asked(*more, schemas=(TOOL,)))
    assert (tools.after, tools.history) == (None, "changed: other tools are given")


def test_a_changed_reply_is_a_change_and_says_where():
    histories = known((asked(HELLO), "hi"))
    place = histories.place(asked(HELLO, message("assistant", "Hi!"), message("user", "and?")))
    assert place.after is None and len(place.new) == 3
    assert place.history == "changed: message 2, of the role assistant, is not the one that the agent knows"


def test_a_conversation_that_was_cut_begins_where_it_is_not_known():
    first = asked(HELLO)
    second = asked(HELLO, message("assistant", "hi"), message("user", "1"))
    histories = known((first, "hi"), (second, "one"))
    place = histories.place(asked(HELLO, message("assistant", "hi"), message("user", "1"), message("assistant", "uno")))
    assert place.after == 0 and [m["content"] for m in place.new] == ["1", "uno"]
    assert place.history == "changed: message 4, of the role assistant, is not the one that the agent knows"
    without = histories.place(asked(HELLO, message("assistant", "one"), message("user", "2")))
    assert without.after is None and without.history.startswith("changed: ")


def test_calls_are_compared_by_what_they_mean_and_not_by_how_they_are_written():
    histories = Histories()
    reply = message("assistant", "", tool_calls=[{"name": "add", "arguments": {"a": 1, "b": 2}}])
    histories.add(asked(HELLO, schemas=(TOOL,)), reply, 0)
    again = message("assistant", "", tool_calls=[{"name": "add", "arguments": {"b": 2, "a": 1}}])
    place = histories.place(asked(HELLO, again, message("tool", "3", name="add"), schemas=(TOOL,)))
    assert (place.after, place.history) == (0, "continued")


def test_a_client_may_leave_out_the_text_beside_calls_that_say_which_reply_it_was():
    histories, calls = Histories(), {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    question, result = asked(HELLO, schemas=(TOOL,)), message("tool", "3", name="add")
    histories.add(question, message("assistant", "I add.", **calls), 0)
    without = asked(HELLO, message("assistant", "", **calls), result, schemas=(TOOL,))
    place = histories.place(without)
    assert (place.after, place.new, place.history) == (0, (result,), "continued")
    histories.add(without, message("assistant", "3"), 1)
    more = (*without.messages, message("assistant", "3"), message("user", "and?"))
    assert histories.place(asked(*more, schemas=(TOOL,))).after == 1
    assert histories.place(asked(*more, agent="bob", schemas=(TOOL,))).history is None
    other = asked(HELLO, message("assistant", "", tool_calls=[{"name": "add", "arguments": {}}]), schemas=(TOOL,))
    assert histories.place(other).after is None
    histories.add(question, message("assistant", "Again.", **calls), 2)  # now it may be either
    assert histories.place(without).after is None


def test_the_space_around_a_reply_does_not_matter_because_clients_leave_it_out():
    histories = known((asked(HELLO), " hi\n"))
    place = histories.place(asked(HELLO, message("assistant", "hi"), message("user", "and?")))
    assert (place.after, place.history) == (0, "continued")


def test_what_others_have_said_as_an_assistant_is_no_change():
    """Agents who share one list of messages, as after a handoff."""
    histories = known((asked(HELLO), "hi"))
    shared = (HELLO, message("assistant", "hi"))
    bobs = asked(*shared, agent="bob")
    assert (histories.place(bobs).after, histories.place(bobs).history) == (None, None)
    histories.add(bobs, message("assistant", "I add.", tool_calls=[{"name": "add", "arguments": {}}]), 1)
    for shown in (
        message("assistant", "I add."),
        message("assistant", "I add.", tool_calls=[{"name": "add", "arguments": {}}]),
    ):
        place = histories.place(asked(*shared, shown, message("user", "and?")))
        assert (place.after, place.history) == (0, "continued") and len(place.new) == 2


def test_what_both_have_said_is_a_change_where_the_agent_has_not_said_it():
    histories = known((asked(HELLO), "hi"), (asked(HELLO, agent="bob"), "hi"))
    place = histories.place(asked(message("user", "good evening"), message("assistant", "hi")))
    assert place.after is None and place.history.startswith("changed: message 1")


def test_an_agents_own_words_go_on_whoever_is_named_and_only_others_keep_their_names():
    """Some clients name the speaker of each reply."""
    histories = known((asked(HELLO), "hi"), (asked(HELLO, agent="bob"), "so"))
    mine, other = message("assistant", "hi", name="ann"), message("assistant", "so", name="bob")
    place = histories.place(asked(HELLO, mine, other, message("user", "and?", name="eve")))
    assert (place.after, place.history) == (0, "continued")
    assert place.new == (other, message("user", "and?", name="eve"))
    changed = histories.place(asked(message("user", "hey"), mine, other))
    assert changed.history.startswith("changed: message 1")
    assert changed.after is None and changed.new[1:] == (message("assistant", "hi"), other)


def test_examples_of_the_program_are_no_change():
    example = (message("user", "1+1"), message("assistant", "2"))
    histories = known((asked(*example, message("user", "1+2")), "3"))
    place = histories.place(asked(*example, message("user", "2+2")))
    assert (place.after, place.history) == (None, None)
