"""Rollouts by vLLM, one ``vllm serve`` for each base model: token ids in, token ids and log-probabilities out.

    vllm serve BASE --enable-lora --max-loras 3 --max-lora-rank 16 --logprobs-mode processed_logprobs
    (with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment)

Of a policy that is a LoRA only the adapter travels, through a folder that trainer and servers see, under a new name after
every update: vLLM caches prefixes by the adapter's name. Full weights travel over a GPU group, by TRL's client.
With ``colocate`` in place of ``urls`` vLLM runs in this process (:mod:`maporl.engines.vllm_here`).
"""

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel

from maporl.agents import Policy
from maporl.config import ConfigError
from maporl.engines.base import Reply, Request
from maporl.engines.transformers import reply_of
from maporl.sections import VLLMSection
from trl_ext import maths, world
from trl_ext.checkpoint import save_policy_weights
from trl_ext.generation import Sampled, number_of

HERE = "vLLM in this process"
OLDEST = (0, 14)
"""The oldest vLLM whose completions return token ids for prompts that are token ids; 0.32.0 is tested."""
PROBE = "The quick brown fox jumps over the lazy dog. 1 + 2 = 3."
MOST_NATS_APART = 1.0
"""How far the probability of the probe's next token may lie from this process's; other weights lie further."""


class VLLMFailure(RuntimeError):
    """A vLLM server gave no answer, or is not what the configuration needs; names the server."""


@dataclass(frozen=True)
class Asked:
    """What a server is asked for: an answer to ``prompt`` by its ``model``; ``label`` says in errors whose it is."""

    label: str
    model: str
    prompt: list[int]
    most: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int | None = None


class Server(Protocol):
    """Where vLLM runs: at a URL, or in this process."""

    url: str

    @property
    def base(self) -> str:
        """Its name for the model that adapters are put on."""

    def answer(self, asked: Sequence[Asked]) -> list[Sampled]:
        """Sampled answers in order: their ids, a stop id included, and their log-probabilities."""

    def tokenize(self, model: str, text: str) -> list[int]:
        """Its tokens of a text, without any that it would add."""

    def load(self, name: str, folder: Path, what: str) -> None:
        """Take the adapter in ``folder`` as ``name``; ``folder`` may go afterwards."""

    def unload(self, name: str, what: str) -> None:
        """Forget an adapter."""


class VLLMEngine:
    """Answers with the policies' weights on vLLM servers.

    Args:
        policies, sections: by policy name; policies of one base name the same servers.
        max_new_tokens: most tokens of an answer.
        temperature: that of training, at which servers must count log-probabilities.
        folder: where adapters are written for servers to read, unless their section names another.
    """

    remote = True
    """Answers with weights of its own while those here change."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        sections: Mapping[str, VLLMSection],
        max_new_tokens: int,
        temperature: float,
        folder: str | Path,
    ):
        self.policies, self.sections = dict(policies), dict(sections)
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.folder = Path(folder).resolve()
        urls = dict.fromkeys(url for section in self.sections.values() for url in section.urls)
        self._servers: dict[str, Server] = {url: _Remote(url, self._section_of(url)) for url in urls}
        here = {name: s.colocate for name, s in self.sections.items() if s.colocate is not None}
        if len(set(here.values())) > 1:
            raise ConfigError(
                f"policies {', '.join(here)}: vllm.colocate differs, and there is one vLLM in this process"
            )
        if here:
            from maporl.engines.vllm_here import Here

            self._servers[HERE] = Here(next(iter(here.values())), [self.policies[name] for name in here])
        self._names: dict[str, str] = {}
        self._versions = 0
        self._started = False
        self._run = world.from_main(uuid.uuid4().hex[:8])
        check_sharing(list(self.policies.values()), self.sections)
        self._senders: dict[str, Any] = {}

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """One reply per request, in order; each goes to the next of its policy's servers."""
        self.start()
        voices = [self.policies[r.policy] for r in requests]
        prompts = [
            r.transcript.hear(r.ask.messages, v.tokenizer, v.stop_ids) for r, v in zip(requests, voices, strict=True)
        ]
        for request, voice, ids in zip(requests, voices, prompts, strict=True):
            voice.check_length(len(ids), self.max_new_tokens, request.label)
        by_server: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            urls = places_of(self.sections[request.policy])
            by_server.setdefault(urls[number % len(urls)], []).append(number)

        def ask(url: str) -> list[Sampled]:
            server = self._servers[url]
            return server.answer([self._asked(requests[i], prompts[i], server, temperature) for i in by_server[url]])

        answers: dict[int, Sampled] = {}
        with ThreadPoolExecutor(len(by_server)) as pool:
            for url, found in zip(by_server, pool.map(ask, by_server), strict=True):
                answers |= dict(zip(by_server[url], found, strict=True))
        return [
            reply_of(r, v, p, answers[i]) for i, (r, v, p) in enumerate(zip(requests, voices, prompts, strict=True))
        ]

    def start(self) -> None:
        """Send every policy's weights, and see whom one talks to; at the first answer, unless done before."""
        if self._started:
            return
        self._started = True
        for name in sorted(self.sections):
            self._push(name)
            for url in places_of(self.sections[name]) if world.is_main() else ():
                self._introduce(self._servers[url], name, self.policies[name])
        world.wait()

    def sync(self, policy: str) -> None:
        """Send the policy's weights, which have changed; all processes call this together."""
        if policy in self.sections and self._started:
            self._push(policy)
            world.wait()

    def metrics(self) -> dict[str, float]:
        """``vllm/pushed``: how often weights were sent."""
        return {"vllm/pushed": float(self._versions)}

    # -- asking ---------------------------------------------------------------------------------------------------

    def _asked(self, request: Request, prompt: list[int], server: Server, temperature: float) -> Asked:
        section, voice = self.sections[request.policy], self.policies[request.policy]
        seed = number_of(request.draw) % 2**63 if section.seeds and request.draw is not None else None
        model = self._model(request.policy, server)
        return Asked(request.label, model, prompt, self.max_new_tokens, temperature, voice.stop_ids, seed)

    def _model(self, policy: str, server: Server) -> str:
        return self._names.get(policy) or self.sections[policy].base or server.base

    def _section_of(self, url: str) -> VLLMSection:
        return next(section for section in self.sections.values() if url in section.urls)

    # -- weights --------------------------------------------------------------------------------------------------

    def _push(self, name: str) -> None:
        voice = self.policies[name]
        self._versions += 1
        if isinstance(voice.model, PeftModel):
            self._push_adapter(name, voice)
        elif voice.trainable:
            self._push_weights(name, voice)

    def _push_adapter(self, name: str, voice: Policy) -> None:
        section, old = self.sections[name], self._names.get(name)
        new = self._names[name] = f"{name}-{self._run}-{self._versions}"
        if not world.is_main():
            return
        folder = Path(section.folder or self.folder).resolve() / new
        save_policy_weights(voice.model, voice.adapter, voice.tokenizer, folder)
        rank = getattr(voice.model.peft_config[str(voice.adapter)], "r", "unknown")
        for url in places_of(section):
            server = self._servers[url]
            if old is not None:
                server.unload(old, f"taking back policy {name!r}")
            server.load(new, folder, f"loading policy {name!r} (a LoRA of rank {rank})")
        shutil.rmtree(folder)  # servers have read it

    def _push_weights(self, name: str, voice: Policy) -> None:
        """Over a GPU group, by TRL's client; not run where this was written, which had no GPU."""
        if self.sections[name].colocate is not None:
            raise VLLMFailure(
                f"policy {name!r} trains all its weights, and vLLM in this process takes adapters only; give it a LoRA "
                "(agents.NAME.lora), or a server (agents.NAME.vllm.urls)"
            )
        if not torch.cuda.is_available():
            raise VLLMFailure(
                f"policy {name!r} trains all its weights, which travel to {', '.join(self.sections[name].urls)} over a GPU group "
                "(NCCL), and this process has no GPU; give it a LoRA (agents.NAME.lora), of which only the adapter travels"
            )
        if not world.is_main():
            return
        from trl.generation.vllm_client import VLLMClient

        for url in self.sections[name].urls:
            if url not in self._senders:
                self._senders[url] = VLLMClient(base_url=url)
                self._senders[url].init_communicator(device=next(voice.model.parameters()).device)
            self._senders[url].update_model_params(voice.model)
            self._senders[url].reset_prefix_cache()

    # -- who is there ---------------------------------------------------------------------------------------------

    def _introduce(self, server: Server, name: str, voice: Policy) -> None:
        """Raise unless the server has this tokenizer and gives this policy's probabilities."""
        model = self._model(name, server)
        ids = voice.tokenizer.encode(PROBE, add_special_tokens=False)
        theirs = server.tokenize(self.sections[name].base or server.base, PROBE)
        if theirs != ids:
            raise VLLMFailure(
                f"{server.url}: its tokenizer reads {PROBE!r} as {theirs[:8]}..., that of policy {name!r} as {ids[:8]}...; serve "
                "the model that the policy was built from"
            )
        [answer] = server.answer([Asked(f"policy {name!r}", model, ids, 1, self.temperature, frozenset())])
        with torch.no_grad(), voice.active() as own:
            logits = own(input_ids=torch.tensor([ids], device=own.device)).logits[0, -1:].float()
        token = torch.tensor(answer.ids, device=logits.device)
        here = float(maths.token_logprobs(logits, token, self.temperature))
        there = (answer.logprobs or [float("nan")])[0]
        if abs(here - there) <= MOST_NATS_APART:
            return
        raw = float(maths.token_logprobs(logits, token, 1.0))
        if self.temperature != 1.0 and abs(raw - there) <= MOST_NATS_APART / 4:
            raise VLLMFailure(
                f"{server.url}: gives log-probabilities before the temperature ({there:.2f}; at {self.temperature} it would be "
                f"{here:.2f}); start it with --logprobs-mode processed_logprobs"
            )
        raise VLLMFailure(
            f"{server.url}: model {model!r} gives a token the log-probability {there:.2f}, policy {name!r} here {here:.2f}; it serves "
            "other weights than agents.NAME.model"
        )


class _Remote:
    """One ``vllm serve``, by the client of package ``openai``, which retries."""

    def __init__(self, url: str, section: VLLMSection):
        try:
            import openai
        except ImportError as error:
            raise ConfigError(
                "engine: vllm needs the package openai; install it with: pip install 'maporl[api]'"
            ) from error
        self.url, self.section = url.rstrip("/"), section
        self._client = openai.OpenAI(
            api_key=os.environ.get(section.key_variable, "none"),
            base_url=self.url + "/v1",
            timeout=section.timeout,
            max_retries=section.retries,
        )
        self._base: str | None = None

    @property
    def base(self) -> str:
        """The server's name for the model that adapters are put on; the version is looked at on the way."""
        if self._base is None:
            version = str(self._call("asking for its version", lambda: self._get("/version")).get("version"))
            parts = [int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit()]
            if len(parts) == 2 and tuple(parts) < OLDEST:
                raise VLLMFailure(f"{self.url}: is vLLM {version}, and {'.'.join(map(str, OLDEST))} or newer is needed")
            listed = self._call("asking for its models", lambda: self._get("/v1/models"))["data"]
            bases = [entry["id"] for entry in listed if entry.get("parent") is None]
            wanted = self.section.base
            if not bases or (wanted is not None and wanted not in bases):
                raise VLLMFailure(f"{self.url}: serves {bases}, and agents.NAME.vllm.base is {wanted!r}")
            self._base = wanted or bases[0]
        return self._base

    def answer(self, asked: Sequence[Asked]) -> list[Sampled]:
        with ThreadPoolExecutor(self.section.concurrency) as pool:
            return list(pool.map(self._complete, asked))

    def _complete(self, asked: Asked) -> Sampled:
        body = {
            "return_token_ids": True,
            "stop_token_ids": sorted(asked.stop_ids),
            "ignore_eos": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        options: dict[str, Any] = {} if asked.seed is None else {"seed": asked.seed}

        def ask() -> Any:
            return self._client.completions.create(
                model=asked.model, prompt=asked.prompt, max_tokens=asked.most, temperature=asked.temperature, top_p=1.0,
                logprobs=0, extra_body=body, **options,
            )  # fmt: skip

        choice = self._call(f"{asked.label}, model {asked.model!r}", ask).choices[0]
        ids = getattr(choice, "token_ids", None)
        if not ids or choice.logprobs is None:
            raise VLLMFailure(
                f"{self.url}: {asked.label}: its answer has no token ids or no log-probabilities; is it a vLLM server?"
            )
        return Sampled(list(ids), [float(v) for v in choice.logprobs.token_logprobs])

    def tokenize(self, model: str, text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._call("tokenising", lambda: self._send("/tokenize", body))["tokens"]

    def load(self, name: str, folder: Path, what: str) -> None:
        self._post("load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, what)

    def unload(self, name: str, what: str) -> None:
        self._post("unload_lora_adapter", {"lora_name": name}, what)

    def _post(self, path: str, body: dict[str, Any], what: str) -> None:
        self._call(what, lambda: self._client.post(f"/{path}", body=body, cast_to=str))

    def _get(self, path: str) -> Any:
        return self._client.get(self.url + path, cast_to=object)

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(self.url + path, body=body, cast_to=object)

    def _call(self, what: str, function: Any) -> Any:
        import openai

        try:
            return function()
        except openai.APITimeoutError as error:
            raise VLLMFailure(
                f"{self.url}: {what}: no answer within {self.section.timeout:g} s, {self.section.retries + 1} times; raise "
                "agents.NAME.vllm.timeout, or look at the server"
            ) from error
        except openai.OpenAIError as error:
            raise VLLMFailure(f"{self.url}: {what}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def check_sharing(policies: Sequence[Policy], sections: Mapping[str, VLLMSection]) -> None:
    """Raise where policies of different bases name one server."""
    owners: dict[str, tuple[str, int]] = {}
    for policy in policies:
        base = policy.model.get_base_model() if isinstance(policy.model, PeftModel) else policy.model
        for url in places_of(sections[policy.name]):
            name, known = owners.setdefault(url, (policy.name, id(base)))
            if known != id(base):
                raise ConfigError(
                    f"policies {name!r} and {policy.name!r} have different bases and name one server, {url}; a server has one base"
                )


def places_of(section: VLLMSection) -> list[str]:
    """The servers of a policy: their URLs, or that in this process."""
    return section.urls if section.colocate is None else [HERE]
