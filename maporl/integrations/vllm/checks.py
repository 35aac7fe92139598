"""Check that vLLM has the tokenizer and the weights of the policies that it answers for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel

from maporl.errors import ConfigError
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import Server, VLLMFailure
from maporl.team.agents import Policy
from trl_ext.models.adapters import changes_base, initialisation
from trl_ext.models.forward import base_of
from trl_ext.models.lora_sampling import matrices
from trl_ext.ppo import maths
from trl_ext.sampling.request import Draw, TokenRequest

PROBE = "The quick brown fox jumps over the lazy dog. 1 + 2 = 3."
MOST_NATS_APART = 1.0
"""How far the log-probability of the probe's next token may differ from this process's. Other weights differ more."""


def check_server(server: Server, base: str, model: str, policy: Policy, temperature: float) -> None:
    """Check that the server has the policy's tokenizer and gives the policy's probabilities.

    Args:
        server: the server.
        base: the server's name of the base model.
        model: the server's name of the policy's weights.
        policy: the policy, with its weights in this process.
        temperature: the temperature of training, at which the server must compute log-probabilities.

    Raises:
        VLLMFailure: the tokenizer or a probability differs.
    """
    name = policy.name
    ids = policy.tokenizer.encode(PROBE, add_special_tokens=False)
    theirs = server.tokenize(base, PROBE)
    if theirs != ids:
        raise VLLMFailure(
            f"{server.url}: its tokenizer reads {PROBE!r} as {theirs[:8]}..., that of policy {name!r} as {ids[:8]}...; "
            "serve the model that the policy was built from"
        )
    [completion] = server.sample([TokenRequest(model, ids, Draw(1, temperature), label=f"policy {name!r}")])
    with torch.no_grad(), policy.active() as local:
        logits = local(input_ids=torch.tensor([ids], device=local.device)).logits[0, -1:].float()
    token = torch.tensor(completion.ids, device=logits.device)
    here = float(maths.token_logprobs(logits, token, temperature))
    there = (completion.logprobs or [float("nan")])[0]
    if abs(here - there) <= MOST_NATS_APART:
        return
    raw = float(maths.token_logprobs(logits, token, 1.0))
    if temperature != 1.0 and abs(raw - there) <= MOST_NATS_APART / 4:
        raise VLLMFailure(
            f"{server.url}: gives log-probabilities before the temperature ({there:.2f}; at {temperature} it would be "
            f"{here:.2f}); start it with --logprobs-mode processed_logprobs"
        )
    raise VLLMFailure(
        f"{server.url}: model {model!r} gives a token the log-probability {there:.2f}, policy {name!r} here "
        f"{here:.2f}; it serves other weights than agents.NAME.model"
    )


def check_served(policies: Sequence[Policy]) -> None:
    """Check that vLLM computes all of the policies' adapters. It has the two matrices of linear layers, and nothing
    else.

    A part that it lacks would not show before it has learned something.

    Raises:
        ConfigError: an adapter is more than that.
    """
    for policy in policies:
        if policy.adapter is None or not isinstance(policy.model, PeftModel):
            continue
        config: Any = policy.model.peft_config[policy.adapter]
        if changes_base(config):
            why = f"its initialisation ({initialisation(config)}) has changed the base, which a server has unchanged"
        elif matrices(policy.model, policy.adapter) is None:
            why = f"it is more than the matrices of linear layers ({type(config).__name__})"
        else:
            continue
        raise ConfigError(
            f"policy {policy.name!r}: vLLM would sample from a part of its adapter {policy.adapter!r}, because {why}; "
            "use engine: transformers, or a LoraConfig with target_modules of linear layers alone"
        )


def check_sharing(policies: Sequence[Policy], sections: Mapping[str, VLLMSection]) -> None:
    """Check that policies of different bases use different servers. In this process each base has its own.

    Raises:
        ConfigError: two policies of different bases use one server.
    """
    owners: dict[str, tuple[str, int]] = {}
    for policy in policies:
        base = id(base_of(policy.model))
        for url in sections[policy.name].urls:
            name, owner_base = owners.setdefault(url, (policy.name, base))
            if owner_base != base:
                raise ConfigError(
                    f"policies {name!r} and {policy.name!r} have different bases and name one server, {url}; a server "
                    "has one base"
                )
