"""What a stranger wrote (configurations, templates, teams) is refused in one line where it could do harm."""

import copy
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from typer.testing import CliRunner

from maporl import Team
from maporl.cli.main import app
from maporl.config import parse_config, read_values, read_yaml
from maporl.config.safe_yaml import MOST_BYTES, parse_yaml
from maporl.errors import ConfigError, RunError, UserError
from maporl.integrations.hub import pull
from maporl.report.read import read_run
from maporl.studies.crossplay.entrants import read_entrants
from maporl.team import saved
from maporl.team.loading import load_tokenizers
from maporl.text import check_placeholders
from trl_ext.chat.encoding import CONCATENATION_TEMPLATE, FALLBACK_TEMPLATE, ChatError, render

PLAIN = "output_dir: x\ntask: {name: toy_sum}\nagents: {ann: {tiny: {}}}\n"


def laughs(levels, first="[x, x, x, x, x, x, x, x, x, x]"):
    lines = [f"  a0: &a0 {first}"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "recipe:\n" + "\n".join(lines) + "\n"


BOMBS = {
    "aliases of aliases": (laughs(9), "more than 50000 values, where an alias counts as what it stands for"),
    "aliases of mappings": ("recipe:\n  a0: &a {x: 1, y: 2}\n" + "".join(f"  a{n}: &a{n} {{p: *a{n - 1 or ''}, q: *a{n - 1 or ''}}}\n" for n in range(1, 40)), "more than 50000 values"),
    "an alias in itself": ("recipe: &a [*a]\n", "an alias stands inside its own anchor"),
    "deep lists": ("recipe: " + "[" * 2_000 + "]" * 2_000, "nested more than 50 deep"),
    "deep lists without an end": ("recipe: " + "[" * 5_000, "nested more than 50 deep"),
    "deep mappings": ("recipe: " + "{a: " * 5_000, "nested more than 50 deep"),
    "deep blocks": ("recipe:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 800)), "nested more than 50 deep"),
    "deep keys": ("? " * 5_000 + "a\n", "nested more than 50 deep|not readable"),
    "a long integer": ("seed: " + "9" * 5_000, "a number of 5000 characters"),
    "a large integer": ("seed: 9999999999999999999999999", "at most 63 bits"),
    "a long hexadecimal integer": ("seed: 0x" + "f" * 5_000, "a number of 5002 characters"),
    "a long integer to base 60": ("seed: !!int " + ":".join(["1"] * 100_000), "a number of 199999 characters"),
    "a long float to base 60": ("seed: !!float " + ":".join(["1"] * 50_000) + ".5", "a number of 100001 characters"),
    "a key twice": ("seed: 1\nseed: 2\n", "the key 'seed' stands twice"),
    "a key twice below": ("recipe: {a: 1, a: 2}\n", "the key 'a' stands twice"),
    "a list as a key": ("? [a]\n: 1\n", "a key is a list or a mapping"),
    "bytes": ("recipe: !!binary L2V0Yy9wYXNzd2Q=\n", "is not a plain value"),
    "a Python object": ("recipe: !!python/object/apply:os.system [true]\n", "is not a plain value"),
    "a set": ("recipe: !!set {a, b}\n", "is not a plain value"),
    "a date": ("recipe: !!timestamp 2024-01-31\n", "is not a plain value"),
    "a number that is none": ("seed: !!int x\n", "invalid literal for int"),
    "a float that is a list": ("seed: !!float []\n", "expected a scalar node"),
    "an alias of nothing": ("recipe: *b\n", "found undefined alias"),
    "a control character": ("seed: \x00\n", "special characters are not allowed"),
    "two documents": ("--- {}\n", "expected a single document"),
    "too long": ("# " + "x" * MOST_BYTES, f"more than {MOST_BYTES} bytes"),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_that_would_explode_is_refused_in_one_line(tmp_path, bomb):
    text, words = BOMBS[bomb]
    (tmp_path / "config.yaml").write_text(PLAIN + text)
    for read, place in ((read_values, tmp_path / "config.yaml"), (read_run, tmp_path), (saved.read_team, tmp_path)):
        with pytest.raises(UserError, match=words) as raised:
            read(place)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
        assert str(tmp_path / "config.yaml") in str(raised.value)


@pytest.mark.slow
def test_thousands_of_faults_are_not_all_named():
    values = yaml.safe_load(PLAIN) | {f"key{number}": "x" * 10_000 for number in range(3_000)} | {"k" * 10_000: 1}
    with pytest.raises(ConfigError, match=r"; and 2993 more faults$") as raised:
        parse_config(values)
    assert len(str(raised.value)) < 10_000


def test_what_people_write_in_yaml_is_still_read():
    text = (
        "lora: &lora {r: 8}\nagents: {ann: {lora: *lora}, bob: {lora: *lora}}\nrate: 1.0e-5\nnone: ~\nyes: true\nbig: "
        "9223372036854775807\n"
    )
    assert parse_yaml(text) == yaml.safe_load(text)
    many = "\n".join(f"k{number}: {number}" for number in range(6_000))
    assert len(parse_yaml(many)) == 6_000, "in less than quadratic time"


@pytest.mark.parametrize("text", ["{question:>99999999999}", "{question!r}", "{question.__class__}", "{question[0]}", "{}", "{0}", "{other}", "{question:{question}}"])  # fmt: skip
def test_a_text_with_placeholders_has_names_only(text):
    """``str.format`` would build texts of gigabytes from a width."""
    with pytest.raises(ValueError, match="stand for one"):
        check_placeholders(text, {"question"})
    check_placeholders("{question} {{a}}", {"question"})
    for key, allowed in (("judge", "prompt"), ("arena", "prompt")):
        values = {**yaml.safe_load(PLAIN), "reward": {key: {"agent": "ann", allowed: text}}}
        with pytest.raises(ConfigError, match=rf"reward\.{key}\.prompt: it may use"):
            parse_config(values)


# -- configurations from the hub -----------------------------------------------------------------------------------


HARMLESS = {
    "output_dir": "/home/someone", "task": {"name": "gsm8k", "source": "openai/gsm8k:main", "instruction": "{question}\n\nSee https://example.org/a."},
    "agents": {"ann": {"model": "org/base", "lora": {"r": 4}}, "bob": {"tiny": {}, "system": "/think and ~ and ../x"}},
    "protocol": {"name": "debate", "opening": "/think {question}"},
    "schedule": {"curriculum": [{"update": 3, "task": {"source": "org/harder"}}]},
}  # fmt: skip
REACHES = {
    "agents.ann.model": ["/home/me/model", "../model", "~/model", "C:\\model", "file:///x", "here", "https://evil.example/m", "org/m/x"],
    "agents.ann.tokenizer": ["/etc", "./tokenizer", "here"],
    "agents.ann.adapter": ["/etc", "here", "a/b/c"],
    "agents.ann.chat_template": ["/etc/passwd", "secrets.txt", "{x}/here.jinja", "here"],
    "agents.ann.engine_options.trust_remote_code": [True],
    "agents.ann.lora.target_modules": ["(.*)*x", "(a|a)*$"],
    "task.source": ["text", "json", "/home/me/data.jsonl", "data.jsonl", "data/private.json", "here", "../x", "file:///etc/passwd", "https://evil.example/d.jsonl"],
    "task.eval_source": ["private.jsonl", "here"],
    "task.encoder": ["/home/me/encoder", "here", "./here"],
    "task.anything": ["/etc/passwd", "file:///etc/passwd", "https://evil.example/?q=", "notes.jsonl"],
    "schedule.curriculum.0.task.source": ["/home/me/data.jsonl", "here"],
    "schedule.curriculum.0.task.encoder": ["here"],
    "reward.verifier.model": ["/home/me/verifier", "here"],
    "reward.verifier.urls": [["http://evil.example:1"]],
    "reward.judge.pattern": ["(a+)+$"],
}  # fmt: skip
SERVERS = {
    "api": {"engine": "openai", "model": None, "lora": None, "api": {"model": "m", "base_url": "http://evil.example", "key_variable": "AWS_SECRET_ACCESS_KEY"}},
    "api without an address": {"engine": "openai", "model": None, "lora": None, "api": {"model": "m"}},
    "vllm": {"engine": "vllm", "vllm": {"urls": ["http://evil.example"]}},
    "vllm here": {"engine": "vllm", "vllm": {"colocate": {"options": {"trust_remote_code": True}}}},
}  # fmt: skip


def put(config, key, value):
    config = copy.deepcopy(config)
    *parts, last = key.split(".")
    place = config
    for part in parts:
        new = {"agent": "bob"} if part == "judge" else {}
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, new)
    place[last] = value
    return config


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``hub(config)`` makes the repository org/team hold ``config``. The present folder has a folder ``here``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/config.json").write_text("{}")
    team = tmp_path / "cache/snapshot"
    team.mkdir(parents=True)
    monkeypatch.setattr(pull, "snapshot_download", lambda name, **options: str(team))

    def hold(config):
        (team / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return team

    return hold


def test_a_harmless_configuration_from_the_hub_is_read(hub):
    hub(HARMLESS)
    config, _ = saved.read_team("org/team")
    assert config.agents["ann"].model == "org/base" and config.output_dir == "team"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    hub(put(HARMLESS, "agents.ann.chat_template", template))
    assert saved.read_team("org/team")[0].agents["ann"].chat_template == template, "the text itself names no file"


def test_a_configuration_from_the_hub_leaves_its_folder_by_no_dots(hub):
    team = hub(HARMLESS)
    for path in (f"{team}/..", f"{team}/../here", f"{team}/../base", f"{team}/ann/../../here"):
        hub(put(HARMLESS, "agents.ann.model", path))
        with pytest.raises(RunError, match=r"org/team: its config\.yaml sets agents.ann.model"):
            saved.read_team("org/team")


@pytest.mark.parametrize("key, value", [(key, value) for key, values in REACHES.items() for value in values])
def test_a_configuration_from_the_hub_names_nothing_of_this_machine(hub, key, value):
    team = hub(put(HARMLESS, key, value))
    with pytest.raises(RunError, match=rf"org/team: its config\.yaml sets {key}") as raised:
        saved.read_team("org/team")
    assert "KEY=VALUE" in str(raised.value) and "hf download org/team --local-dir" in str(raised.value)
    assert "\n" not in str(raised.value)
    if key.partition(".")[0] != "agents":
        assert saved.read_team(team), "whoever has read it and gives the folder trusts it"


@pytest.mark.parametrize("server", SERVERS)
def test_a_configuration_from_the_hub_sends_nothing_to_a_server(hub, server):
    agents = {**HARMLESS["agents"], "ann": SERVERS[server] | ({"model": "org/base"} if "vllm" in server else {})}
    hub({**HARMLESS, "agents": agents})
    with pytest.raises(RunError, match=r"org/team: its config\.yaml sets agents\.ann\.(engine|api|vllm)"):
        saved.read_team("org/team")


def test_what_the_user_sets_may_name_anything(hub):
    hub(put(HARMLESS, "task.source", "/home/author/data.jsonl"))
    config, _ = saved.read_team("org/team", ["task.source=/home/me/data.jsonl", "agents.ann.model=here"])
    assert config.task["source"] == "/home/me/data.jsonl" and config.agents["ann"].model == "here"
    own = ["agents.ann.engine=openai", "agents.ann.model=null", "agents.ann.lora=null", "agents.ann.api={model: mine}"]
    hub(HARMLESS)
    assert saved.read_team("org/team", own)[0].agents["ann"].api.model == "mine"
    stranger = {"model": "m", "base_url": "http://evil.example"}
    hub({**HARMLESS, "agents": {"ann": {"engine": "openai", "api": stranger}, "bob": {"tiny": {}}}})
    with pytest.raises(RunError, match=r"sets agents\.ann\.api\.base_url='http://evil\.example'"):
        saved.read_team("org/team", [own[0], own[3]])


SPY = "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('')\n"
IMPORTED = {
    "task.name": "spy_m:Task",
    "task": {"name": "spy_m:Task", "other": 3},
    "schedule.curriculum.0.task.name": "spy_m:Task",
    "protocol.name": "spy_m:Relay",
    "protocol": {"name": "game", "game": "spy_m:Game"},
    "protocol.feedback": "spy_m:source",
    "reward.sources": {"label": 1.0, "spy_m:source": 0.0},
    "reward.rules": [["own", "spy_m:Best"], [{"spy_m:Best": {}}], [{"spy_m.inner:Best": {"beta": 3}}]],
    "advantage.returns": "spy_m:whole",
    "advantage.baseline": "spy_m:Parts.within",
    "advantage.scale": "spy_m:two",
    "advantage.post": [["spy_m:Times"], [{"align": {"a": 1}}, {"spy_m:Times": {}}]],
    "ppo.objective": "spy_m:clipped",
    "pythonpath": ["/home/me", ["."], [""]],
    "restate": "spy_m:x",
    "a_key_of_later": {"deep": [{"spy_m:x": 1}]},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in IMPORTED.items() for value in (values if isinstance(values, list) else [values])],
)
def test_a_team_from_the_hub_imports_nothing(hub, monkeypatch, tmp_path, key, value):
    """Wherever such a name stands, and wherever a module of this name lies: here, in the team's folder, or
    installed."""
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    for folder in ("", "cache/snapshot", "installed"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "spy_m.py").write_text(SPY)
    team = hub(put(HARMLESS, key, value))
    for read, name in (
        (saved.read_team, "org/team"),
        (Team.from_pretrained, "org/team"),
        (read_entrants, ["org/team", "org/b"]),
    ):
        with pytest.raises(UserError) as caught:
            read(name)
        refused = str(caught.value)
        assert caught.value.exit_status == 2 or re.search(rf"its config\.yaml sets {key}.*=", refused), refused
    for words in (["eval", "org/team"], ["play", "org/team"]):
        assert CliRunner().invoke(app, words).exit_code != 0
    assert list(tmp_path.rglob("*.ran")) == []
    assert "spy_m" not in sys.modules and str(team) not in sys.path


def test_what_the_user_names_for_a_team_from_the_hub_is_the_users_own(hub, tmp_path, monkeypatch):
    """A module in the present folder, never one that came with the team."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_n.py").write_text("from maporl import Arithmetic\n\nReversal = Arithmetic\n")
    (tmp_path / "cache/snapshot/own_n.py").write_text(SPY)
    hub(put(HARMLESS, "task.name", "own_n:Reversal"))
    with pytest.raises(RunError, match=r"sets task\.name='own_n:Reversal'"):
        saved.read_team("org/team")
    hub(put(HARMLESS, "task", {"name": "toy_sum"}))
    config, _ = saved.read_team("org/team", ["task.name=own_n:Reversal"])
    assert config.pythonpath == [str(tmp_path)] and sys.modules["own_n"].__file__ == str(tmp_path / "own_n.py")
    assert list(tmp_path.rglob("*.ran")) == []


@pytest.mark.parametrize("text", ["extends: /home/me/secrets.yaml\n", "extends: ../../other.yaml\n", "agent_defaults: {system: x}\n"])  # fmt: skip
def test_a_team_has_one_whole_configuration(hub, tmp_path, text):
    team = hub(yaml.safe_dump(HARMLESS) + text)
    with pytest.raises(UserError, match=r"extends=|sets agent_defaults"):
        saved.read_team("org/team")
    if text.startswith("extends"):
        with pytest.raises(ConfigError, match="is whole and may name no other file; remove the key"):
            saved.read_team(team)
        with pytest.raises(ConfigError, match="no such configuration file"):
            read_yaml(team / "config.yaml")


@pytest.mark.parametrize("agents", ["[ann]", "5", "{}", "{ann: 5}", "{ann: {policy: 5}}", "{ann: {policy: ../../x, model: org/m}}", "{../x: {model: org/m}}", "{5: {model: org/m}}"])  # fmt: skip
def test_agents_of_the_wrong_kind_are_refused_in_one_line(hub, agents):
    hub(f"output_dir: x\ntask: {{name: toy_sum}}\nagents: {agents}\n")
    with pytest.raises(ConfigError) as raised:
        saved.read_team("org/team")
    assert "\n" not in str(raised.value)


# -- chat templates ------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ eos_token }}"
)
CHAT = [
    {"role": "user", "content": "1+1=\ud800"},
    {"role": "assistant", "content": "é\u2028"},
    {"role": "user", "content": "?"},
]
EXPLOSIVE = {
    "nested loops": ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "processor time"),
    "a macro that calls itself twice": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "processor time"),
    "a text times a number": ("{{ 'a' * 10**10 }}", "MemoryError|processor time"),
    "a text doubled again and again": ("{% set x = namespace(s='a') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}", "MemoryError|processor time"),
    "a wide text": ("{{ 'a'|center(10**10) }}", "MemoryError"),
    "a wide number": ("{{ '%1000000000000d'|format(1) }}", "MemoryError|OverflowError|ValueError"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    "a macro that calls itself": ("{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
    "deep parentheses": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "RecursionError"),
    "a long text": ("{{ 'a' * 20000000 }}", "it makes 20000000 characters"),
    "an escape": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "a refusal": ("{{ raise_exception('no system\nmessages') }}", "TemplateError: no system messages"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
    "a long template": ("{# " + "x" * 2**20 + " #}", "it has 1048582 characters"),
}  # fmt: skip


def test_a_template_renders_as_transformers_renders_it(tiny):
    tokenizer = tiny()[1]
    for template in (CHATML, CONCATENATION_TEMPLATE, FALLBACK_TEMPLATE):
        tokenizer.chat_template = template
        for generate in (True, False):
            expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generate)
            assert render(tokenizer, CHAT, generate) == expected
    tokenizer.chat_template = CHATML
    empty = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None}]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% if m.content is defined %}: {{ m.content }}{% endif %}{% endfor %}"
    )
    assert render(tokenizer, empty) == "user: 1assistant"
    # older versions of transformers give the template the content that is None
    assert tokenizer.apply_chat_template(empty, tokenize=False) in ("user: 1assistant", "user: 1assistant: None")


SLOW = ("a macro that calls itself twice", "a text doubled again and again")
"""Each takes two seconds of processor time, as does the one that is always tried."""


@pytest.mark.parametrize(
    "explosive", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXPLOSIVE]
)
def test_a_template_that_would_explode_ends_in_one_line(tiny, explosive):
    tokenizer = tiny()[1]
    tokenizer.chat_template, words = EXPLOSIVE[explosive]
    with pytest.raises(ChatError, match=rf"cannot render user, assistant, user \(.*({words})") as raised:
        render(tokenizer, CHAT)
    assert "\n" not in str(raised.value)
    tokenizer.chat_template = CHATML
    assert render(tokenizer, CHAT).endswith("<|im_start|>assistant\n<eos>"), "and the next template is rendered"


def test_a_team_with_an_explosive_template_is_refused_before_a_model_loads(tiny, tmp_path):
    _, tokenizer = tiny()
    tokenizer.chat_template = "{{ 'a'|center(10**10) }}"
    tokenizer.save_pretrained(tmp_path)
    config = parse_config({"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": {"model": str(tmp_path)}}})
    with pytest.raises(
        ConfigError, match=r"agents\.ann: the chat template of .*MemoryError.*, or set agents\.ann\.chat_template"
    ):
        load_tokenizers(config)


def test_several_templates_are_refused_where_none_is_for_chats(tiny):
    tokenizer = tiny()[1]
    tokenizer.chat_template = {"tool_use": "x", "rag": "y"}
    with pytest.raises(ChatError, match="set one chat template"):
        render(tokenizer, CHAT)


def test_threads_and_forks_render_side_by_side(tiny):
    tokenizer = tiny()[1]
    tokenizer.chat_template = "{{ messages[0].content }}"

    def echo(number):
        return render(tokenizer, [{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(echo, range(200))) == [str(number) for number in range(200)]
    reading, writing = os.pipe()
    if not (child := os.fork()):  # as a data loader's worker: it has a process of its own, and leaves ours alone
        os.write(writing, echo("child").encode())
        os._exit(0)
    assert echo("parent") == "parent" and os.read(reading, 100) == b"child"
    assert os.waitpid(child, 0)[1] == 0
    assert echo("again") == "again"
