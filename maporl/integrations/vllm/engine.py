"""Rollouts with vLLM, one ``vllm serve`` for each base model: token ids in, token ids and log-probabilities out.

    vllm serve BASE --enable-lora --max-loras 3 --max-lora-rank 16 --logprobs-mode processed_logprobs
    (with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment)

If a policy is a LoRA, only its adapter is sent, through a folder that the trainer and the servers share. It gets a new
name after every update, because vLLM caches prefixes by the adapter's name. Full weights are sent over a GPU group
(:mod:`maporl.integrations.vllm.whole_weights`). With ``colocate`` instead of ``urls``, vLLM runs in this process
(:mod:`maporl.integrations.vllm.colocated`), and full weights are copied.
"""

import shutil
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel

from maporl.engines.build import EngineSetup
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError, install_command
from maporl.integrations.vllm.checks import check_served, check_server, check_sharing
from maporl.integrations.vllm.colocated import ColocatedServer
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import RemoteServer, Server, VLLMFailure
from maporl.integrations.vllm.whole_weights import WeightSender
from maporl.team.agents import Policy
from trl_ext.files.paths import below
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.sampling.engine import Ready, TokenEngine
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

FIRST_GROUP_PORT = 51216
"""The port at which the first server's GPU group meets this process. The next server has the next."""


class VLLMEngine(TokenEngine):
    """Samples from the policies' weights on vLLM servers.

    Args:
        policies: the policies by name. Policies of one base use the same servers.
        sections: the vLLM options of each policy, by its name.
        temperature: the sampling temperature of training. Servers must compute log-probabilities at this temperature.
        folder: where adapters are written for servers to read, unless a section names another folder.
        probe_every: how often a vLLM in this process is asked for a probability, which is compared with that of the
            policy here: after the first weights that it is sent, and then after every so many.

    Raises:
        ConfigError: policies of different bases share a server, an adapter has parts that vLLM lacks, or a package is
            missing.
    """

    remote = True
    """The servers sample from their own copy of the weights."""
    continuous = True
    """vLLM begins with new requests while it works on others."""
    ends_with_eos = True
    """vLLM's grammars know no other end."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        sections: Mapping[str, VLLMSection],
        temperature: float,
        folder: str | Path,
        probe_every: int = 1,
    ):
        check_served([policy for name, policy in policies.items() if name in sections])
        self.policies, self.sections, self.probe_every = dict(policies), dict(sections), probe_every
        self.temperature, self.folder = temperature, Path(folder).resolve()
        urls = dict.fromkeys(url for section in self.sections.values() for url in section.urls)
        self._servers: dict[str, Server] = {url: RemoteServer(url, self._section_of(url)) for url in urls}
        self._places = {name: list(section.urls) for name, section in self.sections.items()}
        self._here = self._start_here()
        for server, names in self._here:
            self._servers[server.url] = server
            self._places |= {name: [server.url] for name in names}
        self._names: dict[str, str] = {}
        self._sent: Counter[str] = Counter()
        """How often the weights of each policy were sent."""
        self._run = distributed.broadcast_from_main(uuid.uuid4().hex[:8])
        check_sharing(list(self.policies.values()), self.sections)
        self._senders: dict[str, WeightSender] = {}

    def advance(self) -> bool:
        """Let every vLLM in this process sample one more token of its completions. Return whether some are running."""
        running = [server.advance() for server, _ in self._here]  # all of them, and not up to the first
        return any(running)

    def release(self) -> None:
        """Give up the requests that are left, and let every vLLM in this process give its memory back."""
        for server in self._servers.values():
            server.release()

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled] | Ready[Sampled]]:
        """Begin to sample one completion for each request. A policy's requests take its servers in turn.

        Raises:
            VLLMFailure: a server is not what the configuration needs, or has not got the weights.
        """
        self._check_weights({request.policy for request in requests})
        by_server: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            urls = self._places[request.policy]
            by_server.setdefault(urls[number % len(urls)], []).append(number)
        futures: dict[int, Future[Sampled] | Ready[Sampled]] = {}
        for url, numbers in by_server.items():
            asked = [self._of_server(requests[i], self._servers[url]) for i in numbers]
            futures |= dict(zip(numbers, self._servers[url].submit(asked), strict=True))
        return [futures[i] for i in range(len(requests))]

    def _of_server(self, request: TokenRequest, server: Server) -> TokenRequest:
        """Return a request as ``server`` reads it."""
        key = request.key if self.sections[request.policy].seeds else None
        return replace(request, policy=self._model(request.policy, server), key=key)

    def sync(self, policy: str, version: int) -> None:
        """Send the weights of ``policy`` to its servers. All processes call this together, and one of them sends.

        The first call for a policy also checks the servers.

        Raises:
            VLLMFailure: a server did not take the weights, or is not what the configuration needs.
        """
        if policy not in self.sections:
            return
        changed = self.policies[policy]
        old = self._names.get(policy)
        if isinstance(changed.model, PeftModel):
            self._names[policy] = f"{policy}-{self._run}-{self._sent.total() + 1}"
        distributed.on_main(lambda: self._send(policy, changed, old))
        self._sent[policy] += 1

    def _send(self, name: str, policy: Policy, old: str | None) -> None:
        adapter = isinstance(policy.model, PeftModel)
        for server, names in self._here:
            if name in names and not policy.is_quantized and not (adapter and server.has_weights):
                server.load_weights(policy.model, f"the weights of policy {name!r}")
        if adapter:
            self._send_adapter(name, policy, old)
        elif policy.trainable and self.sections[name].colocate is None:
            self._send_weights(name, policy)
        sent, copied = self._sent[name], self.sections[name].colocate is not None
        for url in self._places[name] if not sent or (copied and sent % self.probe_every == 0) else ():
            self._introduce(self._servers[url], name, policy)

    def _check_weights(self, policies: Collection[str]) -> None:
        """Send the weights of policies that no server has got. A single process may do this at any time."""
        for policy in sorted(set(policies) - self._sent.keys()):
            if distributed.size() > 1:
                raise VLLMFailure(
                    f"policy {policy!r}: its servers have not got its weights; call the engine's sync({policy!r}) in "
                    f"all {distributed.size()} processes before the first dialogue, as trainers and players do"
                )
            self.sync(policy, 0)

    def metrics(self) -> dict[str, float]:
        """Return ``vllm/pushed``, the number of times that weights were sent."""
        return {"vllm/pushed": float(self._sent.total())}

    def _model(self, policy: str, server: Server) -> str:
        return self._names.get(policy) or self.sections[policy].base or server.base

    def _start_here(self) -> list[tuple[ColocatedServer, list[str]]]:
        """Start a vLLM in this process for each base of the policies that want one. Return each with its policies."""
        bases: dict[int, list[str]] = {}
        for name in self.sections:
            if self.sections[name].colocate is not None:
                bases.setdefault(id(base_of(self.policies[name].model)), []).append(name)
        for names in bases.values():
            if len({self.sections[name].colocate for name in names}) > 1:
                raise ConfigError(
                    f"policies {', '.join(names)}: vllm.colocate differs, and they have one base, for which there is "
                    "one vLLM"
                )
        servers = []
        for names in bases.values():
            section = self.sections[names[0]].colocate
            assert section is not None
            servers.append((ColocatedServer(section, [self.policies[name] for name in names], len(bases)), names))
        return servers

    def _section_of(self, url: str) -> VLLMSection:
        return next(section for section in self.sections.values() if url in section.urls)

    # -- weights --------------------------------------------------------------------------------------------------

    def _send_adapter(self, name: str, policy: Policy, old: str | None) -> None:
        section, new = self.sections[name], self._names[name]
        folder = below(Path(section.folder or self.folder).resolve(), new)
        policy.save(folder)
        rank = getattr(policy.model.peft_config[str(policy.adapter)], "r", "unknown")
        for url in self._places[name]:
            server = self._servers[url]
            if old is not None:
                server.unload(old, f"taking back policy {name!r}")
            server.load(new, folder, f"loading policy {name!r} (a LoRA of rank {rank})")
        shutil.rmtree(folder)  # servers have read it

    def _introduce(self, server: Server, name: str, policy: Policy) -> None:
        base = self.sections[name].base or server.base
        check_server(server, base, self._model(name, server), policy, self.temperature)

    def _send_weights(self, name: str, policy: Policy) -> None:
        """Send full weights over a GPU group. This was written without a GPU and has not been run on one."""
        if not torch.cuda.is_available():
            raise VLLMFailure(
                f"policy {name!r} trains all its weights, which travel to {', '.join(self.sections[name].urls)} over a "
                "GPU group (NCCL), and this process has no GPU; give it a LoRA (agents.NAME.lora, or peft_config), of "
                "which only the adapter travels"
            )
        for url in self.sections[name].urls:
            try:
                self._send_to(url, policy)
            except (RuntimeError, OSError, ValueError) as error:  # of the server, of vLLM's package, and of NCCL
                raise VLLMFailure(
                    f"{url}: did not take the weights of policy {name!r} ({type(error).__name__}: {error}); whole "
                    f"weights need the package vllm here ({install_command('vllm')}), a GPU that the server does not "
                    "use, and a server that was started by: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode "
                    "processed_logprobs "
                    """--weight-transfer-config '{"backend": "nccl"}'"""
                ) from error

    def _send_to(self, url: str, policy: Policy) -> None:
        server = self._servers[url]
        assert isinstance(server, RemoteServer)
        if url not in self._senders:
            # each server meets this process at a port of its own
            port = FIRST_GROUP_PORT + list(self._servers).index(url)
            self._senders[url] = WeightSender(server, port, next(policy.model.parameters()).device)
        self._senders[url].send(dict(policy.model.named_parameters()))


def build(setup: EngineSetup) -> TextEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names.

    If several agents share a policy, it uses the servers of the first of them.
    """
    sections = {
        name: setup.options[next(agent for agent in policy.agents if agent in setup.options)]
        for name, policy in setup.policies.items()
    }
    tokens = VLLMEngine(setup.policies, sections, setup.sampling.temperature, setup.folder / "adapters")
    return TextEngine(setup.policies, tokens, setup.sampling.response_length)
