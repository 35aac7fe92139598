"""vLLM for one policy: with a stand-in server that samples from the adapters that it is sent."""

import copy
import json
import threading
from http.server import ThreadingHTTPServer

import pytest
import torch
from one_policy import QUESTIONS, config, count_a
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import sample
from vllm_engines import FakeVLLM

from maporl import ConfigError, VLLMSampler
from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.server import VLLMFailure
from trl_ext import PPOv2Trainer
from trl_ext.process.random_states import number_of
from trl_ext.sampling.request import Draw


class SamplingServer(FakeVLLM):
    """Answers as vLLM does, with the tiny base model and the adapters that it was told to load."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body))
            self._say(self._answer(body))

    def _answer(self, body):
        server = self.server
        if self.path == "/tokenize":
            return {"tokens": server.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if self.path == "/v1/load_lora_adapter":
            base = copy.deepcopy(server.model)
            server.loaded[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"])
            return "ok"
        if self.path == "/v1/unload_lora_adapter":
            del server.loaded[body["lora_name"]]
            return "ok"
        # vLLM has random numbers of its own; this server has the trainer's, whose key it finds by the seed
        key = server.keys.get(body.get("seed"), ("any",))
        sampling = Draw(
            body["max_tokens"], body["temperature"], stop_ids=frozenset(body["stop_token_ids"]), top_p=body["top_p"]
        )
        [done] = sample(server.loaded[body["model"]].get_base_model(), [body["prompt"]], sampling, [key])
        logprobs = done.logprobs or [-0.1] * len(done.ids)
        return {"choices": [{"finish_reason": "stop", "token_ids": done.ids, "logprobs": {"token_logprobs": logprobs}}]}


@pytest.fixture
def server(tiny):
    model, tokenizer = tiny(alphabet="".join(sorted(set(PROBE + "0123456789+=a"))))
    server = ThreadingHTTPServer(("127.0.0.1", 0), SamplingServer)
    server.model, server.tokenizer, server.loaded, server.requests = model, tokenizer, {}, []
    server.says = {"version": "0.32.0", "models": [{"id": "base", "parent": None}]}
    server.lock = threading.Lock()
    server.keys = {number_of((3, n)) % 2**63: (3, n) for n in range(200)}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def trainer_of(server, folder, sampler=None, **options):
    torch.manual_seed(5)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(server.model), lora, autocast_adapter_dtype=False)
    args = config(folder, **{"learning_rate": 1e-2, "response_length": 8, "gradient_accumulation_steps": 1} | options)
    return PPOv2Trainer(
        args, server.tokenizer, model, train_dataset=QUESTIONS, eval_dataset=QUESTIONS[:4], reward_funcs=count_a,
        sampler=sampler,
    )  # fmt: skip


def trained(trainer, resume=None):
    said = []
    with trainer.training(resume):
        while trainer.goes_on():
            batch = trainer.advantage(trainer.score(trainer.collected()))
            said.append(([c.response_ids for c in batch.completions], batch.token_batches["policy"].advantages))
            trainer.finish_update(trainer.update(batch))
    return said, {n: p.detach().clone() for n, p in trainer.learners["policy"].model.named_parameters() if "lora" in n}


def test_a_run_with_a_server_is_the_run_without_it(server, tmp_path):
    options = {"total_episodes": 24, "num_generations": 2, "stop_strings": ["3", "+a"], "top_p": 0.9}
    alone, own = trained(trainer_of(server, tmp_path / "own", **options))
    trainer = trainer_of(server, tmp_path / "served", VLLMSampler(server.url), **options)
    served, sent = trained(trainer)
    assert len(served) == 3
    for (ids, advantages), (expected, other) in zip(served, alone, strict=True):
        assert ids == expected
        torch.testing.assert_close(advantages, other, atol=1e-4, rtol=1e-4)
    for name, weight in own.items():
        torch.testing.assert_close(sent[name], weight, atol=1e-4, rtol=1e-3, msg=name)
    assert any(float(weight.abs().max()) > 0.01 for name, weight in sent.items() if "lora_B" in name)
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert all(body["stop"] == ["3", "+a"] for body in asked if body["max_tokens"] == 8)


def test_the_server_has_the_present_weights_also_for_evaluations_and_after_resuming(server, tmp_path):
    options = {"total_episodes": 16, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(server, tmp_path / "one", VLLMSampler(server.url), **options)
    trained(trainer)
    [name] = server.loaded
    pushed = {n: p for n, p in server.loaded[name].named_parameters() if "lora" in n}
    mine = {n: p for n, p in trainer.learners["policy"].model.named_parameters() if "lora" in n}
    assert pushed and all(torch.equal(pushed[n], mine[n]) for n in mine)
    trainer.evaluate()
    assert [body["temperature"] for path, body in server.requests if path == "/v1/completions"][-4:] == [0.0] * 4
    again = trainer_of(server, tmp_path / "one", VLLMSampler(server.url), **options)
    again.generate_completions()  # the server has the weights of the start before the checkpoint is loaded
    with again.training(str(tmp_path / "one" / "checkpoint-1")):
        again.inform_samplers()
        loaded = dict(server.loaded[list(server.loaded)[-1]].named_parameters())
        trained_b = {n: p for n, p in again.learners["policy"].model.named_parameters() if "lora_B" in n}
        assert trained_b and all(bool(p.any()) and torch.equal(p, loaded[n]) for n, p in trained_b.items())


def test_full_weights_without_a_gpu_and_wrong_options_are_refused_in_one_line(server, tmp_path, tiny):
    with pytest.raises(ConfigError, match=r"VLLMSampler: .*expected either urls or colocate"):
        VLLMSampler()
    with pytest.raises(ConfigError, match=r"VLLMSampler: unknown key 'retrys'; did you mean 'retries'"):
        VLLMSampler(server.url, retrys=1)
    trainer = PPOv2Trainer(
        config(tmp_path), server.tokenizer, copy.deepcopy(server.model), train_dataset=QUESTIONS, reward_funcs=count_a,
        sampler=VLLMSampler(server.url),
    )  # fmt: skip
    with pytest.raises(VLLMFailure, match=r"policy 'policy' trains all its weights.* this process has no GPU"):
        trainer.train()
