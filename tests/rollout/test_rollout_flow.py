"""Dialogues that go on by themselves, vLLM's weights and memory in the trainer's process, and the choice of engines."""

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
import yaml
from vllm_engines import fake, fake_vllm, inform  # noqa: F401  # fixtures

from maporl import Agent, Team
from maporl.config import to_yaml
from maporl.engines import choice as engine_choice
from maporl.engines.base import Engine, Pending, Reply
from maporl.errors import ConfigError
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import ColocateSection, VLLMSection
from maporl.integrations.vllm.server import VLLMFailure
from maporl.playground.arithmetic import Arithmetic
from maporl.protocols import Debate
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Referee, SpeakerSpec
from maporl.types import Stop
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.request import Draw, TokenRequest


class Slowly(Engine):
    """Answers one waiting request at a time, and those of the first question last."""

    continuous = True

    def __init__(self):
        self.waiting, self.asked, self.released = [], [], 0

    def submit(self, requests, decoding):
        self.asked += [(r.example.id, r.turn) for r in requests]
        pending = [Pending(Future(), lambda text: Reply(text, Stop.EOS)) for _ in requests]
        self.waiting += [(r.example.id == "0", r, one) for r, one in zip(requests, pending, strict=True)]
        return pending

    def advance(self):
        if self.waiting:
            self.waiting.sort(key=lambda item: item[0])
            _, request, one = self.waiting.pop(0)
            one.future.set_result(f"{request.example.id}, {request.ask.agent}, {request.turn}")
        return bool(self.waiting)

    def release(self):
        self.released += 1


class AtOnce(Slowly):
    """Says the same, and answers batches."""

    continuous = False

    def submit(self, requests, decoding):
        return Engine.submit(self, requests, decoding)

    def generate(self, requests, decoding):
        self.asked += [(r.example.id, r.turn) for r in requests]
        return [Reply(f"{r.example.id}, {r.ask.agent}, {r.turn}", Stop.EOS) for r in requests]


class Batches(Referee):
    """Works on batches."""

    batches = True


def driver_of(engines, agents=("ann", "bob"), referee=None):
    task = Arithmetic(operation="sum", largest=9)
    specs = {agent: SpeakerSpec(engine, (agent,)) for agent, engine in zip(agents, engines, strict=True)}
    examples = [replace(task[i], id=str(i)) for i in range(3)]
    return RolloutDriver(task, Debate(turns=2), specs, engines, Decoding(1.0), referee), examples


def played(driver, examples):
    return [[(u.agent, u.turn, u.text) for u in d.utterances] for d in driver.play(examples)]


def test_a_dialogue_goes_on_while_others_wait_and_says_the_same():
    slow, at_once = Slowly(), AtOnce()
    found = played(*driver_of({"a": slow}, ["ann"]))
    assert found == played(*driver_of({"a": at_once}, ["ann"]))
    assert at_once.asked == [("0", 0), ("1", 0), ("2", 0), ("0", 1), ("1", 1), ("2", 1)]
    assert slow.asked == [("0", 0), ("1", 0), ("2", 0), ("1", 1), ("2", 1), ("0", 1)]


@pytest.mark.parametrize("referee", [None, Batches()])
def test_dialogues_step_together_where_an_engine_or_the_referee_takes_batches(referee):
    slow, other = Slowly(), Slowly() if referee else AtOnce()
    played(*driver_of({"a": slow, "b": other}, referee=referee))
    for engine in (slow, other):
        assert [turn for _, turn in engine.asked] == [0, 0, 0, 1, 1, 1]


def test_engines_are_released_if_an_answer_fails():
    class Fails(Slowly):
        def advance(self):
            self.waiting[0][2].future.set_exception(VLLMFailure("gone"))
            return True

    engine = Fails()
    with pytest.raises(VLLMFailure, match="gone"):
        played(*driver_of({"a": engine}, ["ann"]))
    assert engine.released == 1


def test_a_dialogue_does_not_wait_for_a_server_that_is_slow_for_another(fake, tmp_path):
    """Over HTTP: the server answers the first request only when it has been asked for a second turn."""
    server, engine, _ = fake
    engine = engine(tmp_path)
    inform(engine)
    second_turn, first, lock = threading.Event(), [], threading.Lock()
    plain, lengths = server.says["logprob"], []

    def logprob(body):
        with lock:
            first.append(body)
            mine = len(first)
            lengths.append(len(body["prompt"]))
        if len(body["prompt"]) > 1.5 * min(lengths):
            second_turn.set()
        if mine == 1:
            assert second_turn.wait(60), "nobody went on"
        return plain(body)

    server.says["logprob"] = logprob
    task = Arithmetic(operation="sum", largest=9)
    specs = {"ann": SpeakerSpec("vllm", ("ann",))}
    driver = RolloutDriver(task, Debate(turns=2), specs, {"vllm": engine}, Decoding(0.7))
    dialogues = driver.play([task[0], task[1]])
    assert [len(d.utterances) for d in dialogues] == [2, 2] and second_turn.is_set()


# -- vLLM in this process, which plays its part here: tests/integrations/test_vllm_here.py has the real one -----------------


def test_vllm_sleeps_after_the_dialogues_and_wakes_for_weights_and_requests(fake_vllm, tiny):
    team = Team([Agent("ann", *tiny(), engine="vllm")])
    server = fake_vllm(team)
    model, told = team.policies["ann"].model, server._llm.told
    for _ in range(2):
        server.release()
    server.load_weights(model, "the weights")
    server.release()
    server.submit([])
    server.submit([])
    assert told == [("sleep", 1), ("wake",), ("reload_weights",), ("forget",), ("sleep", 1), ("wake",)]
    assert server._llm.options["enable_sleep_mode"] is True
    awake = fake_vllm(team, sleep=False)
    awake.release()
    assert awake._llm.told == [] and awake._llm.options["enable_sleep_mode"] is False


def test_a_thread_gives_up_its_own_requests_and_vllm_sleeps_when_all_are_answered(fake_vllm, tiny):
    server = fake_vllm(Team([Agent("ann", *tiny(), engine="vllm")]))
    asked = [TokenRequest("base", [1], Draw(5, 0.7))]
    found = []
    other = threading.Thread(target=lambda: found.extend(server.submit(asked)))
    other.start()
    other.join()
    [mine] = server.submit(asked)
    server.release()
    assert not found[0].done() and ("sleep", 1) not in server._llm.told
    with pytest.raises(VLLMFailure, match="the request was given up"):
        mine.result()
    assert server.advance() is False and found[0].result().ids == [5]
    server.release()
    assert server._llm.told[-1] == ("sleep", 1)


def test_every_base_has_a_vllm_of_its_own_and_they_share_the_memory(fake_vllm, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMEngine, "_introduce", lambda *arguments: None)
    team = Team([Agent(name, *tiny(seed=seed), engine="vllm") for seed, name in enumerate(("ann", "bob"))])
    section = VLLMSection(colocate=ColocateSection(gpu_memory_utilization=0.4, max_model_len=64))
    engine = VLLMEngine(team.policies, dict.fromkeys(team.policies, section), 0.7, tmp_path)
    inform(engine)
    models = {names[0]: server._llm for server, names in engine._here}
    assert {name: llm.options["gpu_memory_utilization"] for name, llm in models.items()} == {"ann": 0.2, "bob": 0.2}
    for name, llm in models.items():
        assert torch.equal(llm.holds["model.embed_tokens.weight"], team.policies[name].model.model.embed_tokens.weight)


@pytest.mark.parametrize("break_it, message", [
    (lambda llm: setattr(llm, "collective_rpc", lambda *a, **o: None), "holds other ones: model.embed_tokens.weight"),
    (lambda llm: setattr(llm, "reset_prefix_cache", lambda: False), "still uses prefixes of earlier weights"),
    (lambda llm: setattr(llm, "apply_model", lambda function: [(0, [])]), "no tensor can be compared"),
    (lambda llm: setattr(llm, "collective_rpc", None), "did not take the weights: TypeError"),
])  # fmt: skip
def test_weights_that_do_not_arrive_are_noticed(fake_vllm, tiny, break_it, message):
    team = Team([Agent("ann", *tiny(), engine="vllm")])
    server = fake_vllm(team)
    model = team.policies["ann"].model
    server.load_weights(model, "the weights")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 0] += 1e-6
    break_it(server._llm)
    with pytest.raises(VLLMFailure, match=message):
        server.load_weights(model, "the weights")


# -- which engine a configuration gets ------------------------------------------------------------------------------


@pytest.fixture
def gpu(fake_vllm, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        "maporl.validation.preflight.total_bytes", lambda: None
    )  # a torch for GPUs would ask its driver


def values(folder, **agent):
    return {
        "output_dir": str(folder), "task": {"name": "toy_sum"}, "evaluation": {"questions": 0},
        "agents": {"ann": {"model": "org/m", **agent}, "bob": {"model": "org/m", **agent}},
    }  # fmt: skip


def engines(config):
    return {name: agent.engine for name, agent in config.agents.items()}


def test_vllm_is_chosen_where_it_is_installed_and_there_is_an_accelerator(tmp_path, gpu):
    config = from_dict(values(tmp_path))
    assert engines(config) == {"ann": "vllm", "bob": "vllm"}
    assert config.agents["ann"].vllm.colocate.gpu_memory_utilization == 0.6, "two bases"
    lora = from_dict(values(tmp_path, lora={"r": 4}))
    assert lora.agents["ann"].vllm.colocate.gpu_memory_utilization == 0.3, "one base"
    again = from_dict(yaml.safe_load(to_yaml(config)))
    assert again == config, "the record names the engine"


@pytest.mark.parametrize(("agent", "sections", "processes"), [
    ({"engine": "transformers"}, {}, 1), ({}, {"agent_defaults": {"engine": "transformers"}}, 1),
    ({"tiny": {}, "model": None}, {}, 1), ({"load_in_8bit": True, "lora": {}}, {}, 1),
    ({}, {"training": {"use_cpu": True}}, 1), ({}, {"training": {"placement": "split"}}, 1), ({}, {}, 2),
])  # fmt: skip
def test_an_engine_that_is_named_stays_and_vllm_gets_only_what_it_can_hold(
    tmp_path, gpu, monkeypatch, agent, sections, processes
):
    monkeypatch.setattr("maporl.config.agents.find_spec", lambda name: True, raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert set(engines(from_dict(values(tmp_path, **agent) | sections)).values()) == {"transformers"}


def test_the_check_prints_the_engine_that_was_chosen(tmp_path, gpu, tiny):
    model, tokenizer = tiny(context=1024)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    plain = values(tmp_path / "run", model=str(tmp_path / "m"))
    [line] = [line for line in check_run(from_dict(plain)) if line.startswith("agents: ")]
    assert line.count("engine vllm in this process") == 2
    [line] = [line for line in check_run(from_dict(plain | {"training": {"use_cpu": True}})) if line[:8] == "agents: "]
    assert "engine" not in line


def test_vllm_in_this_process_limits_the_context_before_it_starts(tmp_path, fake_vllm, tiny):
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    short = {"engine": "vllm", "vllm": {"colocate": {"max_model_len": 4}}}
    with pytest.raises(ConfigError, match=r"reads at most 4 \(vllm.colocate.max_model_len\)"):
        check_run(from_dict(values(tmp_path / "run", model=str(tmp_path / "m"), **short)))


def test_without_vllm_or_without_an_accelerator_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: None)
    assert set(engines(from_dict(values(tmp_path))).values()) == {"transformers"}
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert set(engines(from_dict(values(tmp_path))).values()) == {"transformers"}


@pytest.mark.parametrize("begun", ["transformers", "vllm"])
def test_a_run_that_has_begun_keeps_its_engines(tmp_path, gpu, begun):
    vllm = {"colocate": {"gpu_memory_utilization": 0.25}} if begun == "vllm" else None
    config = from_dict(values(tmp_path / "run", engine=begun, vllm=vllm))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    assert from_dict(values(tmp_path / "run")) == config
