"""A stand-in of a vLLM server, and a real vLLM in this process."""

import importlib.machinery
import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from maporl import Agent, MultiAgentPPOConfig, Team
from maporl.engines.text import TextEngine
from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.colocated import ColocatedServer
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import ColocateSection, VLLMSection
from trl_ext.ppo import maths


def team_of(model, tokenizer, r=4):
    lora = LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    shared = get_peft_model(model, lora, adapter_name="ann", autocast_adapter_dtype=False)
    shared.add_adapter("bob", lora, autocast_adapter_dtype=False)
    return Team([Agent(n, shared, tokenizer, adapter=n, engine="vllm") for n in ("ann", "bob")])


class FakeLLM:
    """A ``vllm.LLM`` that keeps what it is told in ``told``, and answers every request with token 5 at the next
    step."""

    def __init__(self, **options):
        self.told, self.waiting, self.options, self.llm_engine = [], [], options, self
        self.holds = None

    def add_request(self, name, prompt, parameters, lora_request=None):
        self.waiting.append(name)
        self.told.append(("asked", parameters))

    def step(self):
        answered, self.waiting = self.waiting, []
        completion = SimpleNamespace(token_ids=[5], finish_reason="stop", logprobs=[{5: SimpleNamespace(logprob=-1.0)}])
        return [SimpleNamespace(request_id=name, finished=True, outputs=[completion]) for name in answered]

    def abort_request(self, names):
        self.waiting = [name for name in self.waiting if name not in names]

    def sleep(self, level):
        self.told.append(("sleep", level))

    def wake_up(self):
        self.told.append(("wake",))

    def collective_rpc(self, method, kwargs):
        self.holds = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}
        self.told.append((method,))

    def reset_prefix_cache(self):
        self.told.append(("forget",))
        return True

    def apply_model(self, function):
        return [function(SimpleNamespace(named_parameters=lambda: self.holds.items()))]


@pytest.fixture
def fake_vllm(monkeypatch):
    """A package ``vllm`` whose models sleep, as on a GPU.

    ``colocated(team, **section)`` starts one for the whole team.
    """
    parts = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": lambda **options: SimpleNamespace(**options)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_sleep_mode_available=lambda: True)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return lambda team, **section: ColocatedServer(ColocateSection(**section), list(team.policies.values()))


def inform(engine):
    """Send all weights, as a trainer does before the first dialogue."""
    tokens = getattr(engine, "tokens", engine)
    for name in tokens.policies:
        tokens.sync(name, 0)


class FakeVLLM(BaseHTTPRequestHandler):
    """The routes that the engine uses, answered from ``server.says``; a stand-in, because the real one takes a minute
    to start."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        says = self.server.says
        self._say({"version": says["version"]} if self.path == "/version" else {"data": says["models"]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.server.says.get("hangs") == self.path:
            threading.Event().wait(20)
        if self.path == "/tokenize":
            return self._say({"tokens": self.server.says["tokens"]})
        if self.path.endswith("lora_adapter"):
            refusal = self.server.says.get("refusal")
            return self._say({"error": {"message": refusal}} if refusal else "ok", 400 if refusal else 200)
        logprob = self.server.says["logprob"](body)
        choice = {
            "index": 0, "text": "x", "finish_reason": self.server.says.get("ends", lambda: "stop")(), "token_ids": [self.server.says["token"]],
            "logprobs": {"token_logprobs": [logprob], "tokens": ["x"], "text_offset": [0], "top_logprobs": None},
        }  # fmt: skip
        known = {"id": "1", "object": "text_completion", "created": 1, "model": body["model"]}
        return self._say(known | {"choices": [choice]})

    def _say(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(model, tokenizer, temperature):
    """A server that agrees with a model until told otherwise, and gives every completion one token."""
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1:]
    here = float(maths.token_logprobs(logits, torch.tensor([5]), temperature))
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeVLLM)
    server.requests = []
    server.says = {"version": "0.32.0", "models": [{"id": "base", "parent": None}], "tokens": ids, "token": 5}
    server.says["logprob"] = lambda body: here
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def fake(tiny):
    """(server, engine(**section), team): a server that agrees with the team's model until told otherwise."""
    model, tokenizer = tiny(alphabet="".join(sorted(set(PROBE + "0456789"))))
    team = team_of(model, tokenizer)
    team.find_stop_ids(MultiAgentPPOConfig(output_dir="unused", report_to=[]))
    server = serve(model, tokenizer, 0.7)

    def engine(folder, **section):
        url = f"http://127.0.0.1:{server.server_port}"
        sections = dict.fromkeys(team.policies, VLLMSection(**{"urls": [url], "retries": 0, **section}))
        return TextEngine(team.policies, VLLMEngine(team.policies, sections, 0.7, folder), 4)

    yield server, engine, team
    server.shutdown()


ALPHABET = "".join(sorted(set(PROBE + "0123456789+*=?")))
HERE = ColocateSection(
    gpu_memory_utilization=0.2, max_model_len=128, options={"enforce_eager": True, "max_num_seqs": 8}
)
EXACT = 1e-3
"""The most nats between float32 log-probabilities here and in vLLM. Other weights are whole nats away."""


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def saved(tiny, tmp_path):
    """``saved(seed, tie=False)`` -> (model, tokenizer) from a folder, which vLLM reads too."""

    def save(seed, tie=False):
        model, tokenizer = tiny(seed=seed, alphabet=ALPHABET, hidden_size=128)
        model.config.tie_word_embeddings = tie
        folder = tmp_path / f"base-{seed}-{tie}"
        move(model, seed)
        if tie:
            model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file({"linear.weight": torch.zeros(1, 128)}, folder / "value_head.safetensors")  # as a run saves it
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer

    return save


def move(model, seed):
    """Change all weights by much more than an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator).to(weight)
