"""Agents with tools whose words come from a real vLLM: in this process, on a server, and behind its OpenAI interface.

A tiny model learns by a warm start to call a calculator, and is then served. ``make test-vllm`` runs these tests where
vLLM is installed beside maporl.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise

import pytest
import torch
import yaml
from launches import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import RemoteServer
from maporl.runs.build import build_trainer
from maporl.validation.load import load
from trl_ext.ppo import maths
from trl_ext.sampling.request import Draw, TokenRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment"),
]
ALPHABET = "".join(sorted(set(PROBE + "0123456789+= :;?<>/calculator*")))
CALLING = {
    "tools": ["calculator"],
    "call_format": "tags",
    "call_texts": {"intro": "", "line": "", "tags": "", "returned": "={text}", "failed": "?", "limit": ";"},
}
EXACT = 1e-3
"""The most nats between float32 log-probabilities here and in vLLM."""
TEMPERATURES = {"ann": 0.7, "bob": 1.3}


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


def written(folder, agents, learning_rate=3e-4, **changes):
    config = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum", "largest": 4},
        "tools": {"calculator": {"use": "calculator"}},
        "agents": agents,
        "protocol": {"name": "debate", "turns": 1},
        "reward": {"sources": {"label": 1.0}},
        "ppo": {"response_length": 36},
        "training": {
            "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "use_cpu": True, "save_steps": 0,
            "learning_rate": learning_rate,
        },
        "evaluation": {"questions": 0},
        "updates": 2,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config | changes))
    return folder / "config.yaml"


def trained(path):
    """Train by a configuration. Return its dialogues and its metrics."""
    build_trainer(load(path), quiet=True).train()
    return [
        [json.loads(line) for line in (path.parent / "run" / name).read_text().splitlines()]
        for name in ("dialogues.jsonl", "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """The folder of a tiny model that calls the calculator in four of five turns."""
    folder = tmp_path_factory.mktemp("caller")
    tiny = {"alphabet": ALPHABET, "hidden_size": 64, "layers": 2, "heads": 2, "context": 160}
    warm = {"steps": 400, "batch_size": 32, "learning_rate": 3e-3, "calls": 0.8}
    agents = {"ann": {"tiny": tiny, "engine": "transformers", **CALLING}}
    path = written(folder, agents, learning_rate=1e-9, warm_start=warm, updates=1)
    build_trainer(load(path), quiet=True).train()
    return folder / "run/final/ann"


@pytest.fixture(scope="module")
def served(caller):
    """The address of a server of the model, which takes adapters."""
    port = free_port()
    words = [
        "-m", "vllm.entrypoints.cli.main", "serve", caller, "--host", "127.0.0.1", "--port", port, "--dtype", "float32",
        "--enforce-eager", "--enable-lora", "--max-loras", 2, "--max-lora-rank", 16, "--max-num-seqs", 16,
        "--logprobs-mode", "processed_logprobs", "--served-model-name", "caller",
    ]  # fmt: skip
    command = [sys.executable, *map(str, words)]
    variables = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    server = subprocess.Popen(command, env=variables, start_new_session=True)  # it starts processes of its own
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def segments(dialogues, agent, step=None):
    return [
        u
        for dialogue in dialogues
        if step is None or dialogue["step"] == step
        for u in dialogue["utterances"]
        if u["agent"] == agent
    ]


def check_records(dialogues, metrics, folder):
    """The record of a team, of which ann calls and bob stops at a string of his own, in at most twelve tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    anns, bobs = segments(dialogues, "ann"), segments(dialogues, "bob")
    calls = [u for u in anns if u["calls"]]
    assert len(calls) > len(anns) / 4
    for u in calls:
        assert u["stop"] == "stop" and tokenizer.decode(u["response_ids"]).endswith("</calculator>")
    for dialogue in dialogues:
        of_ann = [u for u in dialogue["utterances"] if u["agent"] == "ann"]
        for first, second in pairwise(of_ann):
            begun = first["prompt_ids"] + first["response_ids"]
            assert second["prompt_ids"][: len(begun)] == begun
            assert second["messages"][0]["content"] == first["calls"][0]["result"]["text"]
    assert {u["stop"] for u in bobs} <= {"stop", "length", "eos"} and "stop" in {u["stop"] for u in bobs}
    for u in bobs:
        text = tokenizer.decode(u["response_ids"])
        assert len(u["response_ids"]) <= 12 and "u" not in text[:-1] and not u["calls"]
        assert (u["stop"] == "stop") == text.endswith("u")
    for name, temperature in TEMPERATURES.items():
        for u in segments(dialogues, name, step=1):  # those of the weights that the folder has
            ids = torch.tensor([u["prompt_ids"] + u["response_ids"]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(u["prompt_ids"]) - 1 : -1].float()
            here = maths.token_logprobs(logits, ids[0, len(u["prompt_ids"]) :], temperature)
            torch.testing.assert_close(here, torch.tensor(u["logprobs"]), atol=EXACT, rtol=0)
        gaps = [row[f"{name}/policy/engine_gap"] for row in metrics if f"{name}/policy/engine_gap" in row]
        assert len(gaps) == 2 and max(gaps) < EXACT, "the weights after an update are those that vLLM samples from"


def team(caller, vllm, **more):
    ann = {**CALLING, "sampling": {"temperature": 0.7}}
    bob = {**CALLING, "sampling": {"temperature": 1.3, "max_tokens": 12, "stop": ["u"]}}
    shared = {"model": str(caller), "engine": "vllm", "vllm": {"seeds": False, **vllm}, **more}
    return {"ann": shared | ann, "bob": shared | bob}


def test_agents_call_in_this_process(caller, tmp_path):
    options = {"enforce_eager": True, "max_num_seqs": 16}
    here = {"colocate": {"gpu_memory_utilization": 0.2, "max_model_len": 160, "options": options}}
    check_records(*trained(written(tmp_path, team(caller, here))), caller)


def test_agents_call_on_a_server(caller, served, tmp_path):
    agents = team(caller, {"urls": [served]}, lora={"r": 4})
    check_records(*trained(written(tmp_path, agents)), caller)


def test_vllm_gives_back_the_tokens_of_a_stop_string(caller, served):
    """Its tokens are sampled ones, so the record has them, with a log-probability each."""
    tokenizer = AutoTokenizer.from_pretrained(caller)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2+1="}], add_generation_prompt=True)
    prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
    server = RemoteServer(served, VLLMSection(urls=[served]))
    [sampled] = server.sample([TokenRequest("caller", prompt, Draw(20, 0.01, stop=("lcu",)))])
    assert tokenizer.decode(sampled.ids) == "<calcu" and len(sampled.logprobs) == 6


def test_an_agent_behind_an_api_calls(caller, served, tmp_path):
    remote = {
        "engine": "openai",
        "api": {"model": "caller", "base_url": f"{served}/v1", "cache": False, "temperature": 0.7},
        **CALLING,
    }
    tiny = {"model": str(caller), "engine": "transformers", **CALLING}
    dialogues, _ = trained(written(tmp_path, {"ann": tiny, "cat": remote}))
    cats = segments(dialogues, "cat")
    calls = [u for u in cats if u["calls"]]
    assert len(calls) > len(cats) / 4 and not any(u["trainable"] for u in cats)
    for u in calls:
        (call,) = u["calls"]
        assert u["text"].endswith("</calculator>") and u["stop"] == "stop" and call["result"]["error"] is None
        assert call["result"]["text"] == str(sum(map(int, call["arguments"]["expression"].split("+"))))
