"""``maporl export --for``: what is written for another server, and that it answers there as the agents do here."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
import yaml
from chat_models import CHATML, FAMILIES, TRL_TEMPLATES, characters
from launches import free_port
from peft import IA3Config, LoraConfig
from tiny_models import lively
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from maporl import Agent, Team
from maporl.config.parse import to_yaml
from maporl.errors import UserError
from maporl.integrations.exporting import agents
from maporl.integrations.exporting.command import export_for
from maporl.integrations.exporting.template import with_system, with_systems
from maporl.rollout.requests import opening
from maporl.runs.build import build_player, build_trainer
from maporl.tasks import build_task
from maporl.team.saved import read_team
from maporl.validation.load import from_dict
from trl_ext.chat.encoding import encode_prompt

ODD = "You are \"Ann\".\n{{ x }} {% raw %} \\n 'q' \U0001f600\u2028\t- done. "
ASKED = {"role": "user", "content": "What is 3 + 4?"}
CHATS = [
    [ASKED],
    [{"role": "system", "content": "Be brief."}, ASKED],
    [ASKED, {"role": "assistant", "content": "7."}, {"role": "user", "content": "Sure?"}],
]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


TOKENIZER = characters(CHATML)


def written(template, chat, **more):
    TOKENIZER.chat_template = template
    try:
        return TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)
    except Exception as error:
        return type(error)


def test_templates_of_families_write_what_training_rendered():
    files = [path for path in sorted(TRL_TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")]
    rendered = 0
    for template in (file.read_text(encoding="utf-8") for file in files):
        several = with_systems(template, {"ann": ODD, "bob": "Check.", "cat": None})
        for chat, tools in ((CHATS[0], [ADD]), (CHATS[1], None), (CHATS[2], None)):
            trained = written(template, opening(ODD, chat), tools=tools)
            assert written(with_system(template, ODD), chat, tools=tools) == trained
            assert written(several, chat, tools=tools, agent="ann") == trained
            assert written(several, chat, tools=tools, agent="cat") == written(template, chat, tools=tools)
            assert isinstance(written(several, chat, tools=tools), type), "nobody is answered without the prompt"
            rendered += isinstance(trained, str) and ODD.strip() in trained
    assert rendered > 2 * len(files) > 40
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ASKED]  # as vLLM may send it
    listed = "{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join }};{% endfor %}"
    assert written(with_system(listed, "Add."), parts) == "Add.\n\nBe brief.;What is 3 + 4?;"


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral", "tiny"])
def test_tokens_are_those_of_training(family):
    trained, exported = FAMILIES[family](), FAMILIES[family]()
    exported.chat_template = with_system(exported.chat_template, "you are ann.\n\n'add'")
    for chat in CHATS:
        text = exported.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = exported(text, add_special_tokens=False)["input_ids"]
        assert ids == encode_prompt(trained, opening("you are ann.\n\n'add'", chat))


def base_folder(folder):
    tokenizer = characters(CHATML)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(tokenizer)}  # fmt: skip
    model = lively(LlamaForCausalLM(LlamaConfig(eos_token_id=3, pad_token_id=0, bos_token_id=None, **sizes)))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    torch.save({}, folder / "training_args.bin")
    return str(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two adapters on a local base, that base as a frozen judge, and two agents of one whole tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    base = base_folder(folder / "some base")
    tiny = {"tiny": {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+=?; adchek"}}
    config = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum", "largest": 9},
        "agents": {
            "ann": {"model": base, "lora": {"r": 4}, "system": 'You add "exactly".'},
            "bob": {"model": base, "lora": {"r": 9}, "system": "You check."},
            "judge": {"model": base, "trainable": False},
            "cat": {**tiny, "system": "add;"}, "dan": {**tiny, "policy": "cat", "system": "check;"},
        },
        "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
        "updates": 1, "ppo": {"response_length": 6, "temperature": 1.0},
        "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 3e-2, "save_steps": 1},
        "evaluation": {"questions": 0, "sampling": {"bob": {"max_tokens": 5}}},
    }  # fmt: skip
    build_trainer(from_dict(config), quiet=True).train()
    return folder / "run"


@pytest.fixture(scope="module")
def said(trained):
    """By agent: the messages of first turns, and the tokens of their greedy answers and prompts, as ``maporl eval`` has
    them."""
    return evaluated(*read_team(trained), trained / "final")


def evaluated(config, folder, weights, questions=3):
    player = build_player(config, weights)
    task = build_task(config.task, "eval", config.seed)
    said = {}
    for dialogue in player.play_evaluation(task, questions, config.evaluation.decoding, config.seed):
        for u in dialogue.utterances:
            if u.turn == 0:
                asked = [message for message in u.messages if message["role"] != "system"]
                said.setdefault(u.agent, []).append((asked, u.response_ids, u.prompt_ids))
    return said


STRANGER = """
import contextlib, io, json, sys
class Refusing:
    def find_spec(self, name, *rest):
        assert name.partition(".")[0] not in ("maporl", "trl_ext"), name
sys.meta_path.insert(0, Refusing())
for block, chats in json.loads(sys.stdin.read()):
    for chat in chats:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block.replace('messages = [{"role": "user", "content": "What is 3 + 4?"}]', "messages = chat"))
        start = inputs["input_ids"].shape[1]
        print(json.dumps([ids[0, :start].tolist(), ids[0, start:].tolist()]))
"""


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["adapters", "merged"])
def test_plain_transformers_answers_as_eval_wherever_the_folder_lies(trained, said, tmp_path, merge):
    export_for(str(trained), tmp_path / "made", "transformers", merge)
    moved = (tmp_path / "made").rename(tmp_path / "else where")
    for file in (path for path in moved.rglob("*") if path.suffix != ".safetensors" and path.is_file()):
        assert str(tmp_path) not in file.read_text() and str(trained.parent) not in file.read_text(), file
    assert not {path.name for path in moved.rglob("*")} & {"training_args.bin", "value_head.safetensors", "critic"}
    page = (moved / "README.md").read_text()
    block = page.split("```python\n")[1].split("```")[0]
    weights = dict.fromkeys(("ann", "bob", "judge"), "./base") | {"cat": "./cat", "dan": "./dan"}
    weights |= {"ann": "./ann", "bob": "./bob"} if merge else {}
    given = []
    for name, turns in said.items():
        lines = [line for line in block.splitlines() if "PeftModel" not in line or name in ("ann", "bob")]
        text = re.sub(r'(CausalLM\.from_pretrained\()"[^"]*"', rf'\1"{weights[name]}"', "\n".join(lines))
        text = re.sub(r'((?:Tokenizer|Config)\.from_pretrained\(|\(model, )"./ann"', rf'\1"./{name}"', text)
        given.append([text, [chat for chat, _, _ in turns]])
        assert f"| `{name}` | " in page and ("PeftModel" in block) is not merge
    command, given = [sys.executable, "-c", STRANGER], json.dumps(given)
    ended = subprocess.run(command, input=given, cwd=moved, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert answers == [[prompt, ids] for turns in said.values() for _, ids, prompt in turns]
    assert len({str(ids) for _, ids in answers}) > 5


def test_serve_sh_starts_a_server_for_each_base_with_the_agents_by_name(trained, tmp_path):
    """From another folder, with a vllm that tells its words."""
    out, fake = tmp_path / "out", tmp_path / "vllm"
    names = ("ann", "bob", "judge", "cat", "dan")
    told = export_for(str(trained / "checkpoint-1"), out, "vllm")
    assert told == [*(str(out / name) for name in names), f"how to go on: {out / 'README.md'}"]
    fake.write_text('#!/bin/sh\necho "$PWD $VLLM_NO_USAGE_STATS $PYTHONPATH $*" >> "$LOG"\n')
    fake.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log")}
    subprocess.run([out / "serve.sh", "--max-model-len", "64"], cwd="/", env=variables, check=True, timeout=20)
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        f"{out} 1 . serve ./base --served-model-name judge --tokenizer ./judge --generation-config ./judge --dtype float32 --host 127.0.0.1 "
        "--port 8000 --enable-lora --max-loras 2 --max-lora-rank 16 --lora-modules ann=./ann bob=./bob --gpu-memory-utilization 0.45 "
        "--chat-template ./chat_template-1.jinja --middleware agents.Agents --max-model-len 64",
        f"{out} 1 . serve ./cat --served-model-name cat dan --tokenizer ./cat --generation-config ./cat --dtype float32 --host 127.0.0.1 "
        "--port 8001 --gpu-memory-utilization 0.45 --chat-template ./chat_template-2.jinja --middleware agents.Agents --max-model-len 64",
    ]
    fake.write_text('#!/bin/sh\necho $$ >> "$LOG.pids"\nexec sleep 60\n')
    running, pids = subprocess.Popen([out / "serve.sh"], env=variables), tmp_path / "log.pids"
    while not pids.exists() or pids.read_text().count("\n") < 2:
        time.sleep(0.05)
    running.terminate()
    assert running.wait(10) == 143
    time.sleep(0.2)
    left = subprocess.run(["ps", "-o", "stat=", "-p", pids.read_text().replace("\n", ",").strip(",")], capture_output=True, text=True)  # fmt: skip
    assert set(left.stdout.split()) <= {"Z", "ZN"}, "no server is left, but for nobody to have asked how it ended"
    options = json.loads((out / "ann/adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == "./base" and not (out / "dan/config.json").exists()
    drawn = {"max_new_tokens": 5, "eos_token_id": [3], "pad_token_id": 0, "temperature": 0.0}
    assert json.loads((out / "bob/generation_config.json").read_text()) == drawn
    fields = json.loads((out / "agents.json").read_text())
    assert fields["bob"] == {"temperature": 0, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "stop_token_ids": [3]}
    assert tuple(fields) == names


def test_turns_others_and_sampling_of_a_team(tmp_path):
    """Weights by turn, an agent behind an API, stop strings, and evaluations that are not greedy."""
    ann = {"tiny": {}, "policy_per": "first_and_rest", "sampling": {"stop": [";"]}}
    config = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum"}, "updates": 1, "ppo": {"response_length": 4},
        "protocol": {"name": "debate", "later": "{others}", "quote": "{text}"},
        "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True},
        "evaluation": {"questions": 0, "temperature": 0.7, "top_p": 0.9},
    }  # fmt: skip
    run, out = tmp_path / "run", tmp_path / "out"
    build_trainer(from_dict(config | {"agents": {"ann": ann, "bob": {"tiny": {}, "trainable": False}}}), quiet=True).train()  # fmt: skip
    far = {"engine": "openai", "api": {"model": "x", "base_url": "http://127.0.0.1:9"}}
    (run / "config.yaml").write_text(to_yaml(from_dict(config | {"agents": {"ann": ann, "far": far}})))
    assert export_for(str(run), out, "vllm")[2:4] == [
        "ann has a model for each turn; ann-turn2 is for all later ones too",
        "Left out: far (openai), which has no weights here",
    ]
    drawn = json.loads((out / "ann-turn1/generation_config.json").read_text())
    expected = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "stop_strings": [";"]}
    assert {name: drawn[name] for name in expected} == expected
    fields = json.loads((out / "agents.json").read_text())["ann-turn2"]
    assert (fields["stop"], fields["include_stop_str_in_output"]) == ([";"], True)


def saved_team(folder, options=None, system="Add."):
    """A team of one agent with an adapter, as ``Team.save`` writes it. A dict changes the options afterwards."""
    base = base_folder(folder / "base")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    changes, lora = (options, None) if isinstance(options, dict) else ({}, options)
    Team.on_one_base(model, tokenizer, [Agent("ann", system=system)], lora).save(str(folder / "team"))
    file = folder / "team/ann/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder / "team"


LINEAR = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("options, system, message", [
    (LoraConfig(use_dora=True, **LINEAR), "Add.", r"agents\.ann: vLLM cannot serve the adapter of ann: its LoraConfig has use_dora=True; give --merge"),
    (LoraConfig(modules_to_save=["lm_head"], **LINEAR), "Add.", r"has modules_to_save=\['lm_head'\]"),
    (LoraConfig(bias="all", **LINEAR), "Add.", "has bias='all'"),
    (LoraConfig(rank_pattern={"q_proj": 2}, **LINEAR), "Add.", "has rank_pattern="),
    (LoraConfig(trainable_token_indices=[5], **LINEAR), "Add.", "has trainable_token_indices="),
    (LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM"), "Add.", "team: an adapter changes the embeddings"),
    (LoraConfig(r=600, **LINEAR), "Add.", "its rank is 600, and vLLM serves up to 512"),
    ({"init_lora_weights": "pissa"}, "Add.", r"its initialisation .*pissa.* has changed the base"),
    (IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"), "Add.", "it is a IA3Config, and vLLM serves LoRA alone"),
    (None, "Stop at <|im_end|>.", r"agents\.ann\.system: its chat template would put it otherwise .*control token"),
], ids=lambda value: getattr(value, "message", None) or type(value).__name__)  # fmt: skip
def test_what_vllm_cannot_serve_is_refused_before_anything_is_written(tmp_path, options, system, message):
    team = saved_team(tmp_path, options, system=system)
    with pytest.raises(UserError, match=message):
        export_for(str(team), tmp_path / "out", "vllm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "team"]


@pytest.mark.parametrize("agent, engine, told", [
    ({"load_in_8bit": True}, "transformers", r"agents\.ann\.load_in_8bit: its weights are quantised when they are loaded"),
    ({"sampling": {"structured_output": {"regex": "[0-9]+"}}}, "transformers", r"structured_output: answers are held to a structured output"),
    ({"sampling": {"structured_output": {"regex": "[0-9]+"}}}, "vllm", '"grammar": "start: /[0-9]+/"'),
    ({"tools": ["calculator"], "call_format": "json"}, "vllm", "ann calls calculator: the client offers and carries them out, by reading the calls"),
])  # fmt: skip
def test_what_an_agent_is_held_to_and_may_call(tmp_path, agent, engine, told):
    file, out = saved_team(tmp_path) / "config.yaml", tmp_path / "out"
    config = yaml.safe_load(file.read_text()) | {
        "protocol": {"name": "debate"},
        "tools": {"calculator": {"use": "calculator"}},
    }
    config["agents"]["ann"] |= agent
    file.write_text(yaml.safe_dump(config))
    if engine == "transformers":
        with pytest.raises(UserError, match=told):
            export_for(str(file.parent), out, engine)
        return
    notes = export_for(str(file.parent), out, engine)
    held = "sampling" in agent
    assert told in ((out / "agents.json").read_text() if held else "\n".join(notes))
    assert ("--structured-outputs-config.backend guidance" in (out / "serve.sh").read_text()) is held
    assert ("calculator" in (out / "ann/chat_template.jinja").read_text()) is not held


def test_what_is_no_lora_is_merged(tmp_path):
    team = saved_team(tmp_path, LoraConfig(use_dora=True, **LINEAR))
    model = Team.from_pretrained(team)
    ids = torch.tensor([[5, 9, 30, 31]])
    with torch.no_grad(), model.policies["ann"].active() as own:
        expected = own(ids).logits
        export_for(str(team), tmp_path / "out", "vllm", merge=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/ann")
        assert torch.allclose(merged(ids).logits, expected, atol=1e-4)
    assert "--enable-lora" not in (tmp_path / "out/serve.sh").read_text()


def test_a_run_that_has_no_weights_and_a_folder_that_is_full_are_refused(trained, tmp_path):
    from typer.testing import CliRunner

    from maporl.cli.main import app

    (tmp_path / "run").mkdir()
    shutil.copy(trained / "config.yaml", tmp_path / "run")
    shutil.copytree(trained / "checkpoint-1", tmp_path / "run/checkpoint-1")
    message = r"no weights of policy 'ann'; the run has not ended: give a checkpoint, such as .*run/checkpoint-1"
    with pytest.raises(UserError, match=message):
        export_for(str(tmp_path / "run"), tmp_path / "out", "vllm")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    for words, status, told in [
        ([tmp_path / "run", tmp_path / "full", "--for", "vllm"], 1, "exists already and is not empty"),
        ([tmp_path / "run/checkpoint-1", tmp_path / "plain", "--merge"], 2, "--merge: goes with --for"),
        ([tmp_path / "nowhere", tmp_path / "plain", "--for", "vllm"], 1, "nowhere"),
        ([tmp_path / "run/checkpoint-1", tmp_path / "plain"], 0, "plain/ann"),
    ]:
        done = CliRunner().invoke(app, ["export", *map(str, words)])
        assert done.exit_code == status and told in done.output, done.output
    assert (tmp_path / "plain/ann/adapter_config.json").is_file() and len(list((tmp_path / "full").iterdir())) == 1


def filled(tmp_path, path, body, fields):
    """The headers and the body that the app behind the middleware gets, in a folder as an export has it."""
    (tmp_path / "agents.json").write_text(json.dumps(fields))
    shutil.copy(agents.__file__, tmp_path / "agents.py")
    spec = importlib.util.spec_from_file_location("exported_agents", tmp_path / "agents.py")
    exported, got = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(exported)
    parts = [{"type": "http.request", "body": body[:9], "more_body": True}, {"type": "http.request", "body": body[9:]}]

    async def app(scope, receive, send):
        got.append((dict(scope["headers"]), (await receive())["body"]))

    async def receive():
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"Content-Length", b"1"), (b"x", b"y")]}
    asyncio.run(exported.Agents(app)(scope, receive, None))
    return got[0]


FIELDS = {"ann": {"temperature": 0, "max_tokens": 6, "stop": [";"]}}


@pytest.mark.parametrize("path, sent, expected", [
    ("/v1/chat/completions", {"model": "ann"}, {"temperature": 0, "max_tokens": 6, "stop": [";"], "model": "ann", "chat_template_kwargs": {"agent": "ann"}}),
    ("/v1/chat/completions", {"model": "ann", "temperature": 0.5, "max_completion_tokens": 9, "stop": None, "chat_template_kwargs": {"a": 1, "agent": "bob"}},
     {"temperature": 0.5, "stop": [";"], "model": "ann", "max_completion_tokens": 9, "chat_template_kwargs": {"a": 1, "agent": "ann"}}),
    ("/v1/completions", {"model": "ann", "prompt": [1]}, {"temperature": 0, "max_tokens": 6, "stop": [";"], "model": "ann", "prompt": [1]}),
    ("/v1/messages", {"model": "ann", "max_tokens": 3}, {"model": "ann", "max_tokens": 3, "chat_template_kwargs": {"agent": "ann"}}),
    ("/v1/chat/completions", {"model": "base"}, {"model": "base"}),
    ("/v1/chat/completions", [1, 2, 3], [1, 2, 3]),
])  # fmt: skip
def test_a_request_gets_what_its_agent_has_and_keeps_what_it_says(tmp_path, path, sent, expected):
    headers, body = filled(tmp_path, path, json.dumps(sent).encode() + b" " * 9, FIELDS)
    assert json.loads(body) == expected and headers == {b"x": b"y", b"content-length": str(len(body)).encode()}


def get(url, body=None):
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


def gap(policy, prompt, ids, others):
    """How much likelier the token of ``ids`` is than the other one where two greedy answers part, in nats."""
    if ids == others:
        return 0.0
    place = next(number for number, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    with torch.no_grad(), policy.active() as model:
        logprobs = model(torch.tensor([prompt + ids[:place]])).logits[0, -1].float().log_softmax(-1)
    return float(logprobs[ids[place]] - logprobs[others[place]])


VLLM, MODEL = shutil.which("vllm"), os.environ.get("MAPORL_TEST_VLLM_MODEL")


@pytest.mark.vllm
@pytest.mark.skipif(not (VLLM and MODEL), reason="needs the command vllm, and MAPORL_TEST_VLLM_MODEL")
def test_a_real_vllm_answers_as_eval_with_two_adapters(tmp_path):
    """On CPUs also VLLM_CPU_KVCACHE_SPACE=1. Of SmolLM2 in float32 all answers were equal."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)  # fmt: skip
    speakers = [
        Agent("ann", system="You are Ann. You answer in one sentence."),
        Agent("bob", system="You are a pirate."),
    ]
    team = Team.on_one_base(model, tokenizer, speakers, LoraConfig(r=4, **LINEAR))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in team.policies["ann"].model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter) if "lora_B" in name else 0)
    team.save(str(tmp_path / "team"))
    play = ["task.name=toy_times", "task.template=What is {a} times {b}?", "protocol.name=debate", "protocol.turns=1", "training.use_cpu=true"]  # fmt: skip
    said = evaluated(*read_team(tmp_path / "team", play), tmp_path / "team", 6)
    export_for(str(tmp_path / "team"), tmp_path / "out", "vllm")
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [str(tmp_path / "out/serve.sh"), "--port", str(port), "--max-model-len", "512", "--enforce-eager"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server, deadline = subprocess.Popen(words, env=variables, start_new_session=True), time.monotonic() + 240
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(1)
        assert [model["id"] for model in get(f"{url}/v1/models")["data"]] == ["base", "ann", "bob"]
        gaps = []
        for name, turns in said.items():
            for chat, ids, prompt in turns:
                answer = get(f"{url}/v1/chat/completions", {"model": name, "messages": chat, "return_token_ids": True})
                assert answer["prompt_token_ids"] == prompt
                gaps.append(gap(team.policies[name], prompt, ids, answer["choices"][0]["token_ids"]))
        print("nats at first differences:", gaps)
        assert [ids for _, ids, _ in said["ann"]] != [ids for _, ids, _ in said["bob"]]
        assert len(gaps) == 12 and max(gaps) < 0.01, "other kernels may break a tie, and nothing else, otherwise"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(f"{url}/v1/chat/completions", {"model": "base", "messages": [ASKED]})
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
