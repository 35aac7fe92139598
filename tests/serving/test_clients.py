"""The programs of ``examples/programs``: real clients and frameworks, the real server, agents of a script, real tokens.

Each says what becomes of the conversations that its client repeats: which go on token by token, and which the client has
changed.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import venv
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from chat_models import SayingEngine, characters, trl_template
from folders import ROOT
from packaging.version import Version

from maporl import Arithmetic
from maporl.engines.text import TextEngine
from maporl.engines.transcript import written_transcripts
from maporl.rollout.agent_tools import formats_of_schemas
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.runs.train import train
from maporl.serving import routes
from maporl.serving.program import Program
from maporl.team.agents import Voice
from maporl.types import Example, Stop
from maporl.validation.load import load
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.engine import Ready, TokenEngine
from trl_ext.sampling.options import Sampled

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Plain(Arithmetic):
    def question(self, example):
        return example.question


def play(solve, scripts, question="What is 2+3?", template=CHATML, own=False, **options):
    """The dialogue of a program with agents who say the lines of their scripts, and the bodies of its requests.

    ``own`` agents may be asked for all that a model of a run may be asked for. Options are those of the protocol.
    """
    tokenizer = characters(template)
    voice = Voice("any", tokenizer, None, frozenset([tokenizer.eos_token_id]))
    lines = {name: [f"{line}<|im_end|>" for line in script] for name, script in scripts.items()}
    specs = {
        name: SpeakerSpec("said", (name,), formats=formats_of_schemas(name, voice, {}), tells_tokens=own)
        for name in scripts
    }
    engine = SayingEngine(tokenizer, lines)
    protocol = Program(run=solve, **{"seconds": 60, **options})
    bodies, read = [], routes.json_of

    async def recorded(request):
        bodies.append(await read(request))
        return bodies[-1]

    routes.json_of = recorded
    try:
        example = Example("q", question, "5")
        (dialogue,) = RolloutDriver(Plain(largest=9), protocol, specs, {"said": engine}, Decoding(1.0)).play([example])
    finally:
        routes.json_of = read
    check_tokens(dialogue)
    return dialogue, bodies


def check_tokens(dialogue):
    """What goes on with a conversation has its tokens, each as it was, before its own."""
    for u in dialogue.utterances:
        if u.after is not None:
            before = dialogue.utterances[u.after]
            earlier = before.prompt_ids + before.response_ids
            assert u.prompt_ids[: len(earlier)] == earlier, f"utterance {u.id} does not go on with {u.after}"


def call(name, **arguments):
    """A call as an agent writes it."""
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def told_of(dialogue):
    """Of each utterance: who, whether it went on with an earlier one, and of what."""
    return [(u.agent, u.after, u.tags.get("history")) for u in dialogue.utterances]


ADD = call("add", a=2, b=3)
CHANGED = "changed: message 3, of the role assistant, is not the one that the agent knows"
CASES = {
    "with_openai": (
        {"solver": [" 4 ", "5"], "checker": ["no, 5"]},
        [("solver", None, ()), ("checker", None, (0,)), ("solver", 0, (0, 1))],
    ),
    "with_openai_async": (
        {"solver": ["4", "5"], "checker": ["6", "5"]},
        [("checker", None, ()), ("solver", None, ()), ("checker", 0, (0, 1)), ("solver", 1, (0, 1))],
    ),
    "with_openai_stream": (
        {"solver": ["4", "\n5", "5"], "checker": ["no", "yes"]},
        [
            ("solver", None, ()),
            ("checker", None, (0,)),
            ("solver", 0, (0, 1)),
            ("checker", None, (2,)),
            ("solver", 2, (0, 1, 2, 3)),
        ],
    ),
    "with_anthropic": (
        {"solver": ["I add." + ADD, " 4 ", "5"], "checker": ["no, 5"]},
        [("solver", None, ()), ("solver", 0, (0,)), ("checker", None, (1,)), ("solver", 1, (0, 1, 2))],
    ),
    "with_langgraph": (
        {"solver": ["I add." + ADD, "It is 7."], "checker": ["5"]},
        [("solver", None, ()), ("solver", 0, (0,)), ("checker", None, (1,))],
    ),
    "with_agents_sdk": (
        {"solver": ["I add." + ADD, call("transfer_to_checker"), "It is 5."], "checker": ["It is 7."]},
        [("solver", None, ()), ("solver", 0, (0,)), ("checker", None, (0, 1)), ("solver", 1, (0, 1, 2))],
    ),
    "with_autogen": (
        {"solver": ["4 ", " 6"], "checker": ["No.", "yes"], "judge": ["7", "It is 5."]},
        [
            ("solver", None, ()),
            ("checker", None, (0,)),
            ("judge", None, (0, 1)),
            ("solver", 0, (0, 1, 2)),
            ("checker", 1, (0, 1, 2, 3)),
            ("judge", 2, (0, 1, 2, 3, 4)),
        ],
    ),
    "with_pydantic_ai": (
        {"solver": ["So:" + call("check", answer="4"), "It is 7.", " It is 5 "], "checker": ["no"]},
        [("solver", None, ()), ("checker", None, (0,)), ("solver", 0, (0, 1)), ("solver", 2, (0, 1, 2))],
    ),
    "with_smolagents": (  # it writes calls and results in texts of its own
        {
            "solver": ["I ask." + call("checker", task="2+3"), call("final_answer", answer="5")],
            "checker": [ADD, call("final_answer", answer="5")],
        },
        [("solver", None, ()), ("checker", None, (0,)), ("checker", CHANGED, (0, 1)), ("solver", CHANGED, (0, 2))],
    ),
}
"""What the agents say, and of each utterance: who, which one it goes on with or why with none, and whom it has read."""
ANSWERS = {"with_agents_sdk": "It is 5.", "with_autogen": "It is 5.", "with_pydantic_ai": "It is 5"}
OPTIONS = {"with_smolagents": {"ignore": ("tool_choice",)}}
HERE = {  # the modules of those that are installed with the extra dev
    "with_openai": ["openai"],
    "with_openai_async": ["openai"],
    "with_openai_stream": ["openai"],
    "with_anthropic": ["anthropic"],
    "with_langgraph": ["langgraph", "langchain_openai"],
    "with_agents_sdk": ["agents"],
    "with_pydantic_ai": ["pydantic_ai"],
}
OTHERS = {  # the packages of others
    "with_autogen": ("autogen_agentchat", ["autogen-agentchat", "autogen-ext[openai]"]),
    "with_smolagents": ("smolagents", ["smolagents[openai]"]),
}


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/programs"))


def installed(module):
    return importlib.util.find_spec(module) is not None


def in_names(told):
    """What was said, with the agent of the utterance that is continued in place of its number."""
    return [(agent, None if after is None else told[after][0], parents) for agent, after, parents in told]


def check(name):
    scripts, talk = CASES[name]
    dialogue, _ = play(importlib.import_module(name).solve, scripts, **OPTIONS.get(name, {}))
    assert "failure" not in dialogue.outcome, dialogue.outcome["failure"]
    assert all(u.tags["history"] == "continued" for u in dialogue.utterances if u.after is not None)
    said = [(u.agent, u.tags.get("history") if u.after is None else u.after, u.parents) for u in dialogue.utterances]
    if name == "with_openai_async":  # two agents are asked at the same time, and which comes first is a matter of load
        said, talk = (sorted(in_names(told), key=str) for told in (said, talk))
    assert said == talk
    counts = dict.fromkeys(("calls", "requests", "answered"), len(said))
    assert dialogue.outcome == {"answer": ANSWERS.get(name, "5"), **counts}


@pytest.mark.parametrize("name", HERE)
def test_a_client_goes_on_with_conversations_token_by_token(name, examples):
    for module in HERE[name]:
        pytest.importorskip(module)
    if name == "with_agents_sdk" and Version(version("openai-agents")) < Version("0.24"):
        pytest.skip("0.4 fails at responses with newer versions of openai, and those between are not tried")
    check(name)


def test_a_program_that_cuts_its_memory_begins_another_conversation_and_one_that_keeps_all_goes_on(
    examples, monkeypatch
):
    pytest.importorskip("openai")
    program = importlib.import_module("with_memory")
    monkeypatch.setattr(program, "TURNS", 4)
    scripts = {"solver": ["1", "2", "3", "4", "I said 4.", "5"], "checker": ["no"] * 4}
    dialogue, bodies = play(program.solve, scripts)
    told = [(after, history or "") for agent, after, history in told_of(dialogue) if agent == "solver"]
    assert [(after, history.partition(":")[0]) for after, history in told] == [
        (None, ""), (0, "continued"), (2, "continued"), (4, "continued"), (4, "continued"), (None, "changed"),
    ]  # fmt: skip
    assert [message["content"] for message in bodies[-1]["messages"]] == [
        "What is 2+3? So far: I said 4.", "4", "no"
    ]  # fmt: skip
    scripts["solver"].remove("I said 4.")
    dialogue, bodies = play(program.keep_all, scripts)
    told = [history for agent, _, history in told_of(dialogue) if agent == "solver"]
    assert told == [None, *["continued"] * 4] and len(bodies[-1]["messages"]) == 9


@pytest.fixture(scope="module")
def tried_clients():
    """The table of clients, and what fills it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks/clients"))
        yield importlib.import_module("table")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("openai", ["openai"]),
        ("anthropic", ["anthropic"]),
        ("langgraph", HERE["with_langgraph"]),
        ("openai_agents", ["agents"]),
        ("pydantic_ai", ["pydantic_ai"]),
    ],
)
def test_the_page_says_what_works_with_a_client(name, modules, tried_clients):
    for module in modules:
        pytest.importorskip(module)
    (client,) = [client for client in tried_clients.clients() if client.name == name]
    written = tried_clients.rows(tried_clients.PAGE.read_text())[client.title]
    if version(client.package) != written[1]:
        pytest.skip(f"the page is about {client.package} {written[1]}")
    module = importlib.import_module(client.file.stem)

    def run(aspect):
        return lambda question, base_url, api_key: getattr(module, aspect)(question, base_url, api_key)

    now = tried_clients.row(client, written[1], run)
    assert now[:-1] == written[:-1], f"write the page again: make test-clients CLIENTS={name}"


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """The Python of an environment around this one, which has the packages that are missing here too."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    library = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (library / "around.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    wanted = [package for module, packages in OTHERS.values() if not installed(module) for package in packages]
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *wanted], check=True)
    return folder / "bin/python"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_clients_whose_packages_are_in_an_environment_of_their_own(name, examples, request):
    if installed(OTHERS[name][0]):
        check(name)
        return
    python = request.getfixturevalue("around")
    ran = subprocess.run([python, "-m", "pytest", "-q", request.node.nodeid], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_the_configuration_of_the_examples_trains_both_agents(tmp_path):
    pytest.importorskip("openai")
    changes = ["updates=1", "branching.group=2", f"output_dir={tmp_path / 'run'}"]
    train(load(ROOT / "examples/programs/team.yaml", changes), resume=False, quiet=True)
    [update] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert update["solver/continued_share"] == 1.0 and update["program/failed"] == 0.0
    assert update["solver/val/first_ratio"] == update["checker/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)


TOOL = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def test_a_client_repeats_calls_in_its_own_way_and_the_conversation_goes_on():
    """As an object, as a mapping with nulls, without nulls, and in a stream."""
    openai = pytest.importorskip("openai")

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": question}]
        for dump in (lambda m: m, lambda m: m.model_dump(), lambda m: m.model_dump(exclude_none=True)):
            tools = [{"type": "function", "function": TOOL}]
            with client.chat.completions.stream(model="ann", messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
            [asked] = message.tool_calls
            assert (asked.function.name, json.loads(asked.function.arguments)) == ("add", {"a": 1})
            messages.append(dump(message))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": [{"type": "text", "text": "2"}]})
        return client.chat.completions.create(model="ann", messages=messages, tools=tools).choices[0].message.content

    dialogue, _ = play(program, {"ann": ["I add." + call("add", a=1)] + 2 * [call("add", a=1)] + ["2"]})
    assert [u.tags.get("history") for u in dialogue.utterances] == [None, "continued", "continued", "continued"]
    assert dialogue.outcome == {"answer": "2", "calls": 4, "requests": 4, "answered": 4}


class Rambling(TokenEngine):
    """Says the next line of a script up to a stop token, whatever stop string it has before that."""

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines = tokenizer, list(lines)

    def submit(self, requests):
        sampled = []
        for request in requests:
            ids = self.tokenizer.encode(self.lines.pop(0), add_special_tokens=False)
            end = 1 + next(place for place, token in enumerate(ids) if token in request.draw.stop_ids)
            sampled.append(Ready(Sampled(ids[:end], [-1.0] * end)))
        return sampled


ONE, OTHER = (f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in (1, 2))
TWO = f"{ONE}\n{OTHER}\nI wait."
BARE = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'


@pytest.mark.parametrize(
    ("template", "special", "line", "text"),
    [
        ("qwen3", False, TWO, ONE),
        ("qwen3", True, TWO, '\n{"name": "add", "arguments": {"a": 1}}'),
        ("llama3_1", False, BARE, BARE),
    ],
    ids=["a mark ends the call", "the mark is a special token", "the template shows one call"],
)
def test_where_the_chat_template_writes_calls_one_ends_the_reply_if_it_may_have_one_only(template, special, line, text):
    openai = pytest.importorskip("openai")
    tokenizer = characters(trl_template(template).replace("<|eot_id|>", "<|im_end|>"))
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    voice = Voice("said", tokenizer, None, frozenset([tokenizer.eos_token_id]))
    lines = [f"{line}<|im_end|>", "It is 3.<|im_end|>", f"{line}<|im_end|>"]
    engine = TextEngine({"said": SimpleNamespace(voice=voice)}, Rambling(tokenizer, lines), 400)
    specs = {"ann": SpeakerSpec("said", ("said",), formats=formats_of_schemas("ann", voice, {}))}

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        asked = {"model": "ann", "tools": [{"type": "function", "function": TOOL}], "parallel_tool_calls": False}
        messages = [{"role": "user", "content": question}]
        first = client.chat.completions.create(messages=messages, **asked).choices[0].message
        [called] = first.tool_calls
        messages += [first, {"role": "tool", "tool_call_id": called.id, "content": "3"}]
        client.chat.completions.create(messages=messages, **asked)
        both = client.chat.completions.create(messages=messages[:1], **asked | {"parallel_tool_calls": True})
        return " ".join(call.function.arguments for call in both.choices[0].message.tool_calls)

    driver = RolloutDriver(Plain(largest=9), Program(run=program, seconds=60), specs, {"said": engine}, Decoding(1.0))
    [dialogue] = driver.play([Example("q", "1+2?", "3")])
    first, second, _ = dialogue.utterances
    assert dialogue.outcome["answer"] == '{"a": 1} {"a": 2}', "without the field it may have several"
    assert (first.text, first.stop) == (text.strip(), Stop.EOS if text == line else Stop.STOP)
    assert [call.arguments for call in first.calls] == [{"a": 1}] and second.after == first.id
    check_tokens(dialogue)
    if template == "qwen3":
        shown = tokenizer.decode(second.prompt_ids[len(first.prompt_ids) + len(first.response_ids) :])
        assert shown.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>")


def test_alternatives_that_a_sampler_does_not_know_are_refused_by_name():
    openai = pytest.importorskip("openai")
    tokenizer = characters(CHATML)
    voice = Voice("said", tokenizer, None, frozenset([tokenizer.eos_token_id]))
    engine = TextEngine({"said": SimpleNamespace(voice=voice)}, Rambling(tokenizer, ["5<|im_end|>"] * 2), 9)
    spec = SpeakerSpec("said", ("said",), tells_tokens=True)

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        asked = {"model": "ann", "messages": [{"role": "user", "content": question}], "logprobs": True}
        assert client.chat.completions.create(**asked).choices[0].logprobs.content[0].top_logprobs == []
        with pytest.raises(openai.BadRequestError, match="top_logprobs: this agent's sampler does not know them"):
            client.chat.completions.create(**asked, top_logprobs=2)
        return "5"

    driver = RolloutDriver(Plain(), Program(run=program, seconds=60), {"ann": spec}, {"said": engine}, Decoding(1.0))
    [dialogue] = driver.play([Example("q", "2+3?", "5")])
    assert dialogue.outcome["answer"] == "5" and len(dialogue.outcome["refused"]) == 1


def test_who_speaks_in_a_group_chat_is_shown_to_an_agent():
    openai = pytest.importorskip("openai")

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": question, "name": "user"}]
        messages += [{"role": "user", "content": "I say 6.", "name": "bob"}, {"role": "assistant", "content": "No."}]
        messages[-1]["name"] = "eve"
        first = client.chat.completions.create(model="ann", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": first, "name": "ann"}, {"role": "user", "content": "Sure?"}]
        return client.chat.completions.create(model="ann", messages=messages).choices[0].message.content

    dialogue, _ = play(program, {"ann": ["4", "5"]}, "2+3?")
    assert characters(CHATML).decode(dialogue.utterances[1].prompt_ids) == (
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>user\nbob: I say 6.<|im_end|>\n"
        "<|im_start|>assistant\neve: No.<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [u.tags.get("history") for u in dialogue.utterances] == [None, "continued"]


JSON_CALL = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
NATIVE_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "said", "shown"),
    [
        (
            CHATML,
            JSON_CALL,
            f"<|im_start|>assistant\n{JSON_CALL}<|im_end|>\n<|im_start|>user\nadd returned: 2\nBob?<|im_end|>",
        ),
        (
            "qwen3",
            NATIVE_CALL,
            f"<|im_start|>assistant\n{NATIVE_CALL}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>",
        ),
    ],
    ids=["plain", "native"],
)
def test_an_agent_without_tools_is_shown_calls_of_others_as_agents_write_them(template, said, shown):
    openai = pytest.importorskip("openai")
    template = template if template == CHATML else trl_template(template)

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": question}]
        tools = [{"type": "function", "function": TOOL}]
        first = client.chat.completions.create(model="ann", messages=messages, tools=tools).choices[0].message
        messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}]
        messages.append({"role": "user", "content": "Bob?"})
        for _ in range(2):
            second = client.chat.completions.create(model="bob", messages=messages).choices[0].message
            messages += [second, {"role": "user", "content": "Sure?"}]
        return second.content

    dialogue, _ = play(program, {"ann": [said], "bob": ["2", "Two."]}, template=template)
    assert [u.tags.get("history") for u in dialogue.utterances] == [None, None, "continued"]
    tokenizer, last = characters(template), dialogue.utterances[-1]
    assert shown in tokenizer.decode(last.prompt_ids)
    formats = formats_of_schemas("bob", Voice("bob", tokenizer), {})
    [written] = written_transcripts(
        dialogue, "bob", "bob", tokenizer, frozenset([tokenizer.eos_token_id]), brought=formats
    )
    assert (
        written.ids == last.prompt_ids + last.response_ids and sum(written.sampled_mask) == len("2") + len("Two.") + 2
    )


def test_responses_of_a_client_go_on_and_name_parents():
    openai = pytest.importorskip("openai")

    def program(question, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        tools = [{"type": "function", **TOOL, "strict": True}]
        items = [{"role": "user", "content": question}]
        first = client.responses.create(model="ann", input=items, tools=tools, instructions="Add.")
        assert first.output_text == "I add."
        [asked] = [item for item in first.output if item.type == "function_call"]
        items += [*first.output, {"type": "function_call_output", "call_id": asked.call_id, "output": "2"}]
        with client.responses.stream(model="ann", input=items, tools=tools, instructions="Add.") as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            second = stream.get_final_response()
        assert pieces == [second.output_text] == ["It is 2."]
        named = {"x-maporl-parents": first.id}
        return client.responses.create(model="bob", input="Say it.", extra_headers=named).output_text

    dialogue, _ = play(program, {"ann": ["I add." + call("add", a=1), "It is 2."], "bob": ["2"]})
    said = [(u.agent, u.after, u.tags.get("history"), u.parents) for u in dialogue.utterances]
    assert said == [("ann", None, None, ()), ("ann", 0, "continued", (0,)), ("bob", None, None, (0,))]
