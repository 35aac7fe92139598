"""Tiny runs in each of which some options matter, with another value for each of these options.

A key that ends with ``!`` replaces what the plain run has there, and is merged into it otherwise. Runs name the parts of
a user's own as ``option_cases:NAME``.
"""

import asyncio
import json
import random
import threading
from dataclasses import dataclass, field
from typing import Any

from perturbed_training import words
from scripted_training import recipe_values

from maporl import Environment, Tool, Toolbox

TINY = {"alphabet": "0123456789+=;-?", "hidden_size": 8, "layers": 1, "heads": 2, "context": 256}
CHARS = '0123456789+*= :;?abcdefghijklmnopqrstuvwxyz/<>(),.{}"A_'
TEXTS = {"intro": "", "line": "", "json": "", "tags": "", "returned": "={text};", "failed": "?{text};", "limit": ";"}
PLAIN: dict[str, Any] = {
    "seed": 3, "updates": 3, "task": {"name": "toy_sum", "largest": 4},
    "agent_defaults": {"tiny": TINY}, "agents": {"ann": {}, "bob": {}},
    "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
    "reward": {"sources": {"label": 1.0, "option_cases:spread": 1.0}},
    "ppo": {"response_length": 4, "num_ppo_epochs": 2, "temperature": 1.0},
    "training": {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True, "save_steps": 0},
    "evaluation": {"questions": 4},
}  # fmt: skip
MEANS = {"returns": "utterance", "baseline": "mean", "scale": "std", "key": ["prompt", "agent", "turn"]}
GROUPS = {
    "branching": {"group": 4}, "advantage": MEANS,
    "ppo": {"kl_in": "loss", "kl_estimator": "k3", "kl_coef": 0.1, "num_mini_batches": 2},
}  # fmt: skip
LEARNED = {"warm_start": {"steps": 30, "learning_rate": 2e-2}, "task": {"largest": 1}}
"""A few right answers among wrong ones."""
ROLES = {"agents": {"ann": {"role": "a", "policy": "one"}, "bob": {"role": "b", "policy": "one"}}}
SPEAKS = {
    "tiny": {**TINY, "alphabet": CHARS, "context": 2048},
    "call_format": "json",
    "call_texts": TEXTS,
    "limits": {"calls": 3},
}
LONG = {"ppo": {"response_length": 110}, "updates": 2, "evaluation": {"questions": 0}}


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``more`` above them. A key that ends with ``!`` replaces what was there."""
    out = dict(values)
    for key, value in more.items():
        name, old = key.removesuffix("!"), out.get(key)
        out[name] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return out


@dataclass
class Case:
    """A run, by what it has besides ``PLAIN``, and the options that are changed in it, one at a time.

    ``refused`` has values that the checks refuse by the name of their option, because they read it. ``recipe`` names a recipe whose tiny version takes the place of ``PLAIN``. ``script`` says what agents say.
    """

    more: dict[str, Any]
    changes: dict[str, Any]
    script: Any = None
    recipe: str | None = None
    refused: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(init=False)

    def __post_init__(self):
        base = PLAIN
        if self.recipe is not None:
            base = recipe_values(self.recipe, "") | {"evaluation": {"questions": 0}, "seed": 9}
            base["training"] |= {"save_steps": 0}
        self.values = merged(base, self.more)


def forks(how: str, **protocol: Any) -> dict[str, Any]:
    order = {"name": "chain", "order": ["ann", "bob"], "later": "{others};{question}", "quote": "{text}"}
    advantage = {**MEANS, "scale": "none", "key": ["prompt", "agent"]}
    branching = {"how": how, "group": 3}
    return {
        "protocol!": protocol or order,
        "branching": branching,
        "reward": {"rules": ["own"]},
        "advantage": advantage,
    }


def loop(*stages: dict[str, Any]) -> dict[str, Any]:
    section = {"rounds": 2, "questions": 6, "stages": list(stages)}
    return merged(LEARNED, {"loop": section, "branching": {"group": 4}, "protocol": {"turns": 1}})


def schedule(**section: Any) -> dict[str, Any]:
    small = {"updates": 4, "training": {"per_device_train_batch_size": 2}, "evaluation": {"questions": 0}}
    return small | {"schedule": section}


def world(use: str, **section: Any) -> dict[str, Any]:
    sources = {"sources!": {"label": 1.0, "shop": 1.0}}
    return LONG | {
        "agent_defaults": SPEAKS,
        "agents": {"ann": {"tools": ["shop"]}},
        "environments": {"shop": {"use": use, **section}},
        "reward": sources,
    }


def under(section: str, **values: Any) -> dict[str, Any]:
    """Return values by the paths of options below a section."""
    return {f"{section}.{key.replace('__', '.')}": value for key, value in values.items()}


def call(name: str, **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def says(*texts: str):
    """Return a script that draws one of ``texts`` by the request's place in the run."""
    return lambda request: random.Random(str(request.rng_key or request.transcript.messages)).choice(texts)


SFT = {"train": "sft", "build": {"threshold": {"above": 0.3}}, "learning_rate": 1e-3}
CASES: dict[str, Case] = {
    "plain": Case({}, {
        "restate": "base_model", "dialogues_logged": 2, "task": {"name": "toy_sum", "largest": 5}, "seed": 4, "updates": 2,
        "protocol": {"name": "debate", "turns": 2, "later": "{question};{others}", "quote": "{text}"},
        **under("agents.ann", tiny__architecture="qwen3", tiny__alphabet="0123456789+=;-?x", tiny__hidden_size=16, tiny__layers=2,
                tiny__heads=4, policy="bob", policy_per="turn", role="critic", system="?", trainable=False, learning_rate=1e-3, critic="model",
                sampling__temperature=0.5, sampling__top_p=0.5, sampling__top_k=3, sampling__max_tokens=2, sampling__stop=["1"]),
        **under("agents.ann.algorithm", advantage={"returns": "token_agent_gae"}, ppo={"lam": 0.5}, critic="none", critic_per_turn=False,
                critic_context="joint", detach_critic=True, learning_rate=1e-3, value_learning_rate=1e-4, lr_scheduler_type="constant",
                warmup_steps=1, max_grad_norm=1e-3, weight_decay=0.5, adam_beta2=0.5, critic_warmup=1),
        **under("reward", sources={"label": 1.0}, horizon="current", share="individual", discount=0.9, rules=["own"]),
        **under("advantage", returns="token_agent_gae", baseline="none", scale="none", key=["agent"]),
        **under("schedule", preset="one_turn_at_a_time", train_first_turn=False, critic_warmup=1),
        **under("ppo", num_ppo_epochs=1, num_mini_batches=2, local_rollout_forward_batch_size=2, max_tokens_per_generate=20,
                keep_states=False, keep_states_gib=1e-6, max_tokens_per_microbatch=20, logits_chunk=2, response_length=3,
                stop_token="none", stop_token_id=5, stop_strings=["1"], temperature=0.5, top_p=0.5, top_k=3, missing_eos_penalty=0.5,
                kl_coef=0.0, kl_estimator="k3", objective="reinforce", ratio_to="sampler", ratio="sequence", cliprange=1e-4,
                cliprange_high=1e-4, dual_clip=1.001, engine_tis_cap=1.0, aggregation="sequence_sum", entropy_coef=0.1, vf_coef=1.0,
                cliprange_value=1e-4, target_kl=1e-6, gamma=0.5, lam=0.5, lam_alpha=0.1, lam_critic=0.5, critic_updates=2, whiten_rewards=True),
        **under("training", learning_rate=1e-3, value_learning_rate=1e-4, lr_scheduler_type="constant", critic="none", detach_critic=True,
                per_device_train_batch_size=2, gradient_accumulation_steps=2, warmup_steps=1, max_grad_norm=1e-3, weight_decay=0.5,
                adam_beta2=0.5, optim="adamw_torch", gradient_checkpointing=True, bf16=True, save_steps=1, eval_steps=1,
                report_to=["tensorboard"], critic_per_turn=False, critic_context="joint"),
        **under("evaluation", questions=2, temperature=1.0, sampling__ann__temperature=1.0, sampling__ann__max_tokens=1),
        "warm_start.steps": 2,
    }, refused={"agents.ann.tiny.context": 6, "ppo.total_episodes": 8, "only_in_python": {"task": "a class of a notebook"}}),
    "roles": Case(ROLES, {"training.role_gradients": 1, "training.balance": "role"}),
    "charges": Case(merged(ROLES, {"reward": {"charges": {"option_cases:spread": {"weight": 0.5}}}}),
                    {"reward.charges.option_cases:spread.weight": 0.2, "reward.charges.option_cases:spread.roles": ["a"]}),
    "folder": Case({"agent_defaults!": {"model": "{model}", "chat_template": "{% for m in messages %}{{ m.content }}{{ sign }};{% endfor %}"}}, under(
        "agents.ann", model="{other}", tokenizer="{tokenizer}", chat_template="fallback", template_options={"sign": "="}, dtype="bfloat16",
        attn_implementation="eager")),
    "adapter": Case({"agent_defaults!": {"model": "{model}", "chat_template": "{% for m in messages %}{{ m.content }};{% endfor %}"}}, {"agents.ann.adapter": "{adapter}"}),
    "verifier folder": Case({"reward": {"sources": {"verifier": 1.0}, "verifier": {"model": "{verifier}"}}}, under(
        "reward.verifier", model="{other verifier}", attn_implementation="eager", reads="dialogue", pays="output")),
    "api": Case({"agents": {"ann!": {"engine": "openai", "api": {"model": "m", "base_url": "{server}", "cache": False, "retries": 0}}}, "ppo": {"stop_strings": ["+"]}}, under(
        "agents.ann.api", model="n", base_url="{server}/v2", key_variable="MAPORL_TEST_KEY", max_tokens=2, temperature=0.1,
        length_field="max_completion_tokens", leave_out=["stop"])),
    "bins": Case({"ppo": {"value_loss": "hl_gauss", "value_range": [-1.0, 1.0]}}, under("ppo", value_range=[0.0, 1.0], value_bins=5, value_sigma=3.0)),
    "huber": Case({"ppo": {"value_loss": "huber"}}, {"ppo.huber_delta": 0.01}),
    "huber delta": Case({"ppo": {"value_loss": "huber", "huber_delta": 0.01}}, {"ppo.value_loss": "clipped"}),
    "model": Case({"training": {"critic": "model"}}, {"training.critic_freeze": "attention", "agents.ann.algorithm.critic_freeze": "attention"}),
    "lora": Case({"agent_defaults": {"lora": {}}}, under("agents.ann.lora", r=2, alpha=64, target_modules=["q_proj"])),
    "groups": Case(GROUPS, {
        **under("advantage", ddof=0, eps=0.5), **under("branching", group=3, how="fork_first"),
    }),
    "losses": Case(merged(GROUPS, {"advantage": {"scale": "none"}}), {"ppo.kl_in": "reward"}),
    "reinforce": Case(merged(GROUPS, {"ppo": {"objective": "reinforce", "tis_cap": 2.0}}), {"ppo.tis_cap": 0.9}),
    "objectives": Case(merged(GROUPS, {"reward": {"rules": ["own"]}}), {"advantage.multi_objective_aggregation": "normalize_then_sum"}),
    "units": Case(merged(GROUPS, {"advantage": {"key": ["prompt", "agent"], "plus": [{"key": ["prompt"]}]}}), {
        "advantage.unit": "rollout", "advantage.post": ["whiten"], "advantage.plus.0.unit": "rollout",
    }),
    "plus": Case(merged(GROUPS, {"advantage": {"plus": [{"returns": "reward_to_go", "weight": 0.5}]}}), under(
        "advantage.plus.0", weight=1.0, returns="utterance", baseline="loo", scale="none", key=["prompt"], gamma=0.5)),
    "single": Case(merged(GROUPS, {"branching": {"group": 1}, "advantage": {"singleton": "raw"}}), {"advantage.singleton": "zero"}),
    "single plus": Case(merged(GROUPS, {"branching": {"group": 1}, "advantage": {"singleton": "raw", "key": ["prompt"],
                        "plus": [{"key": ["prompt", "agent", "turn"]}]}}), {"advantage.plus.0.singleton": "zero"}),
    "turns": Case({"advantage": {"returns": "turn_gae", "scale": "none", "key": ["agent"]}}, {"advantage.lam": 0.5, "advantage.gamma": 0.5}),
    "ema": Case(merged(GROUPS, {"advantage": {"baseline": "ema", "scale": "none", "key": ["agent"]}}), {"advantage.ema": 0.5}),
    "assisted": Case(merged(GROUPS, {"advantage": {"baseline": "assisted", "scale": "none"}}), {"advantage.alpha": 0.5}),
    "equal": Case(merged(GROUPS, {"reward": {"sources!": {"label": 1.0}}, "task": {"largest": 1}}), {"branching.resample": 2}),
    "deals": Case({"branching": {"group": 2}}, {"branching.common_seed": False}, words, "spiral"),
    "cross": Case(forks("fork_every", **PLAIN["protocol"] | {"turns": 1}), {"branching.joint": "cross"}),
    "tree": Case(forks("tree"), {"branching.pick": "sample"}),
    "best": Case(forks("best_of"), {"branching.drafts": 2}),
    "outputs": Case(forks("stages"), {"branching.keep": 1, "branching.choose": "balanced"}),
    "search": Case(merged(forks("tree_search", name="attempts", rounds=4), {
        "agent_defaults": {"tiny": {"alphabet": CHARS, "context": 4096}}, "branching": {"group": 4}, "evaluation": {"questions": 0},
        "reward": {"rules": [{"tree_margin": {}}], "sources!": {"label": 0.5, "option_cases:spread": 0.5}}, "advantage": {"key": ["prompt"]},
    }), {"branching.posterior": "beta"}),
    "without": Case({"branching": {"group": 2, "ablate": {"who": ["ann", "bob"]}},
                     "reward": {"rules": ["own", {"mix": {"weights": {"marginal": 1.0}}}]}},
                    under("branching.ablate", who=["bob"], how="coalitions", placeholder="0", samples=2)),
    "bonus": Case({**LEARNED, "agents": {"cat": {}}, "reward": {"bonus": {"alpha": [0.1, 0.2, 0.3, 0.4]}}},
                  under("reward.bonus", alpha=[1, 1, 1, 1], mode="upstream", right=0.4, wrong=0.6)),
    "brevity": Case({"reward": {"sources": {"brevity": 1.0}, "brevity": {"tokens": 4}}}, {"reward.brevity.tokens": 2}),
    "penalties": Case({"reward": {"penalties": {"min_tokens": 3}}}, under(
        "reward.penalties", too_short=1.0, min_tokens=4, no_final_answer=1.0, no_eos=1.0, mode="replace")),
    "calls": Case(LONG | {
        "agent_defaults": SPEAKS | {"tools": ["double"]}, "tools": {"double": {"use": "option_cases:double"}}, "advantage": {"scale": "none"},
        "reward": {"penalties": {"call": 0.1, "call_unread": 0.2, "call_failed": 0.3, "no_final_answer": 0.4, "repetition": 0.2}},
    }, {
        **under("reward.penalties", call=1.0, call_unread=1.0, call_failed=1.0, repetition=1.0),
        **under("agents.ann", tools=[]), **under("agents.ann.limits", calls=1, failures=1, seconds=0.05, result_tokens=3, at_limit="end"),
        **under("agents.ann.call_texts", intro="abc", line="abc", json="abc", returned="abc{text}", failed="abc{text}", limit="abc"),
        "tools.double.use": "option_cases:treble", "tools.double.seconds": 0.05,
    }, says(call("double", n=4), call("double", n=7), call("double", n=9), call("nope"), '<call>{"name</call>', "7", "12 12 12 12 12", call("double", n=1) * 2)),
    "tags": Case(LONG | {"agent_defaults": SPEAKS | {"tools": ["calculator"], "call_format": "tags"}, "tools": {"calculator": {"use": "calculator"}}},
                 {"agents.ann.call_format": "json", "agents.ann.call_texts.tags": "abc"}, says("<calculator>1+1</calculator>", "7")),
    "words": Case(LONG | {"agent_defaults": SPEAKS | {"tools": ["search"], "call_format": "tags"},
                          "tools": {"search": {"use": "option_cases:Finder", "options": {"prefix": "a"}}}},
                  {"tools.search.options": {"prefix": "b"}}, says("<find>1</find>", "7")),
    "counter": Case(world("option_cases:Counter", options={"step": 1}, lost_at_most=1.0), under(
        "environments.shop", use="option_cases:Twice", options={"step": 2}, agents=["ann", "bob"], calls=1, seconds=0.05),
        says(call("up"), call("up"), "7")),
    "doors": Case(world("option_cases:Doors") | {"updates": 1, "training": {"per_device_train_batch_size": 2}}, {"environments.shop.at_once": 1}, says("7")),
    "shop": Case(world("option_cases:Shop", reward="sold"), {"environments.shop.reward": "asked"}, says(call("buy", count=1), "7")),
    "verifier": Case(merged(LEARNED, {"reward": {"sources": {"verifier": 1.0}, "verifier": {"tiny": TINY, "learn_every": 1, "learning_rate": 1e-2}},
                                      "branching": {"group": 4}, "protocol": {"turns": 1}}),
                     under("reward.verifier", batch_size=2, learn_every=2, learning_rate=1e-4, pairs="all", learn_from="all", restart=True,
                           output_penalty=1.0, loss="answers", tiny__architecture="qwen3", tiny__alphabet="0123456789+=;-?x",
                           tiny__hidden_size=16, tiny__layers=2, tiny__heads=4), refused={"reward.verifier.tiny.context": 4}),
    "answers": Case(merged(LEARNED, {"reward": {"sources": {"verifier": 1.0}, "verifier": {
        "tiny": TINY, "learn_every": 1, "learning_rate": 1e-2, "loss": "answers", "learn_from": "all"}}, "branching": {"group": 4}, "protocol": {"turns": 1}}),
        under("reward.verifier", score_penalty=1.0, epochs=2, authors=["ann"], growth=2.0)),
    "spans": Case(schedule(opening=[{"updates": 1, "turns": [1]}], cycle=[{"updates": 1, "turns": [2]}, {"updates": 1, "turns": [1]}]), under(
        "schedule", opening__0__updates=2, opening__0__turns=[2], cycle__0__updates=2, cycle__0__turns=[1])),
    "freeze": Case(schedule(freeze=[{"agent": "ann", "first": 1, "last": 2}]), under("schedule.freeze.0", agent="bob", first=2, last=3)),
    "swap": Case(merged(schedule(swap={"agents": ["ann", "bob"], "every": 1}), {"agents": {"cat": {}}}), under(
        "schedule.swap", agents=["ann", "cat"], every=2)),
    "one by one": Case(schedule(round_robin={"every": 1}), under("schedule.round_robin", every=2, agents=["bob"])),
    "pool": Case(schedule(opponent_pool={"agent": "bob", "of": "ann", "every": 1, "keep": 3, "probability": 0.9}) | {"updates": 6}, under(
        "schedule.opponent_pool", agent="ann", of="bob", every=2, keep=1, probability=0.1)),
    "curriculum": Case(schedule(curriculum=[{"update": 2, "task": {"largest": 9}}]), under("schedule.curriculum.0", update=3, task={"largest": 8})),
    "growth": Case(schedule(growth={"every": 1, "options": {"turns": [1, 2]}}), under("schedule.growth", every=2, options={"turns": [2, 1]})),
    "taught": Case({"agent_defaults": {"tiny": {"alphabet": CHARS}}, "task!": {"name": "toy_skills"}, "warm_start": {"steps": 3, "agents": {"ann": {"wrong": 0.2}}}}, under(
        "warm_start", batch_size=8, learning_rate=1e-2, wrong=0.9, agents__ann__wrong=0.9, agents__ann__gives_in=0.9, agents__ann__skill="next")),
    "taught calls": Case(LONG | {
        "agent_defaults": SPEAKS | {"tools": ["calculator"]}, "tools": {"calculator": {"use": "calculator"}},
        "warm_start": {"steps": 2, "agents": {"ann": {}}},
    }, {"warm_start.calls": 0.0, "warm_start.agents.ann.calls": 0.0}),
    "drawn": Case({"evaluation": {"temperature": 1.0}}, under("evaluation", top_p=0.5, top_k=2, sampling__ann__top_p=0.5, sampling__ann__top_k=2,
                  sampling__ann__stop=["1", "2", "3", "4", "5"])),
    "saved": Case({"training": {"save_steps": 1}}, {"training.save_total_limit": 1}),
    "best weights": Case({"evaluation": {"questions": 4}, "training": {"save_steps": 1, "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "accuracy/turn_1"}},
                 {"training.metric_for_best_model": "agreement/turn_1", "training.load_best_model_at_end": False}),
    "rates": Case({"training": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}},
                  {"training.lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "agents.ann.algorithm.lr_scheduler_kwargs": {"min_lr_rate": 0.5}}),
    "sft": Case(loop(SFT), {**under("loop.stages.0", learning_rate=1e-4, build="best_of", epochs=2.0, batch_size=2, replay="all", roles=["ann"], start="initial"),
                            **under("loop", rounds=1, questions=2)}),
    "replayed": Case(loop(SFT | {"replay": "all"}), {"loop.stages.0.replay_size": "current"}),
    "dpo": Case(loop(SFT, {"train": "dpo", "build": "gap", "learning_rate": 1e-3, "epochs": 2}), under(
        "loop.stages.1", beta=1.0, reference="round", joint=True, norm=True, likelihood=1.0)),
    "turn critic": Case(loop({"train": "turn_critic", "build": "trajectory_pairs", "learning_rate": 1e-3},
                             {"train": "dpo", "build": {"rank_halves": {"candidates": 4, "pairs": 2}}, "learning_rate": 1e-3}) | {"protocol": {"turns": 2}},
                        under("loop.stages.0", privileged="{answer}", mean_over="dialogue")),
    "updates": Case(loop({"train": "ppo", "updates": 2}), under("loop.stages.0", updates=1, group=2)),
    "oni": Case({"task": {"count": 2}}, under("reward.annotator", prompt="{observation}\nLabel: 1?", pattern="(\\d)", largest=2.0, read=None, every=2, per_update=2), words, "oni"),
    "reseek": Case({}, under("reward.judgement", right=0.9, wrong_yes=-2.0, wrong_no=-2.0), words, "reseek"),
    "arena": Case({}, under("reward.arena", pattern="(B)"), words, "arenarl"),
    "judge": Case({
        "agents": {"eve": {"trainable": False}, "eva": {"trainable": False}}, "protocol": {"agents": ["ann", "bob"]}, "agent_defaults": {"tiny": {"alphabet": CHARS}},
        "reward": {"sources": {"judge": 1.0}, "judge": {"agent": "eve", "prompt": "{question}{answer}", "pattern": "(\\d)", "unreadable": 0.0}},
    }, under("reward.judge", agent="eva", prompt="{answer}", pattern="(\\d\\d)", largest=2.0, unreadable=0.5)),
    "distill": Case({"branching": {"group": 2}, "reward": {"distill": {"weight": 0.1}}}, {"reward.distill.teacher": "bob", "reward.distill.weight": 1.0}),
}  # fmt: skip
"""Each run, by its name."""


def below(section: str, names: str) -> list[str]:
    """Return the paths of options of a section."""
    return [f"{section}.{name}" for name in names.split()]


ELSEWHERE = {
    "cli/test_main.py": ["agents.*.pad_token"],
    "config/test_imports.py": ["pythonpath"],
    "engines/test_engines.py": below("agents.*", "engine engine_options"),
    "environments/test_bad_tools.py": ["environments.*.lost_at_most"],
    "environments/test_environments.py": below("environments.*", "forks on_lost"),
    "environments/test_isolated.py": below("environments.*", "open_seconds close_seconds isolate"),
    "fuzz/test_servers.py": [
        *below("agents.*.api", "concurrency timeout retries"),
        *below("agents.*.vllm", "key_variable concurrency"),
    ],
    "integrations/ray/test_cluster.py": ["training.use_cpu"],
    "integrations/ray/test_groups.py": [
        "cluster.groups.*.engines.rows",
        *below("cluster.failures", "deadline engine_replacements group_restarts snapshots"),
    ],
    "integrations/ray/test_joining.py": ["cluster.address"],
    "integrations/ray/test_places.py": [
        "cluster.devices.cpu",
        "cluster.groups.*.sharing",
        *below("cluster.groups.*.engines", "replicas pool"),
        *below("cluster.pools.*", "accelerator resource"),
        *below("cluster.groups.*.learner", "pool node"),
    ],
    "integrations/ray/test_remote_weights.py": ["cluster.groups.*.learner.strategy"],
    "integrations/ray/test_verifier_pool.py": ["cluster.scoring.verifier.replicas"],
    "integrations/test_vllm_engine.py": below("agents.*.vllm", "seeds timeout retries"),
    "integrations/test_vllm_sampler.py": below("agents.*.vllm", "urls base folder"),
    "integrations/tinker/test_tinker_parts.py": [
        *below("cluster.tinker", "base_url sessions key_variable"),
        *below("agents.*.tinker", "base_url critic"),
        *below("cluster.tinker.prices.*", "read sampled trained"),
    ],
    "loops/test_loops.py": ["loop.accept", "loop.stages.train"],
    "loops/test_recorded_rounds.py": ["loop.dialogues"],
    "methods/test_coach.py": ["reward.judge.scores"],
    "methods/test_oni.py": ["reward.annotator.agent"],
    "methods/test_reseek.py": ["reward.judgement.similar"],
    "playground/test_parts.py": ["agents.*.limits.parallel", "warm_start.agents.*.together"],
    "rewards/test_identity.py": ["reward.verifier.on_change"],
    "rewards/test_judges.py": below("reward.arena", "agent prompt"),
    "rollout/test_rollout_flow.py": below(
        "agents.*.vllm.colocate", "gpu_memory_utilization max_model_len sleep options"
    ),
    "system/test_ray.py": [
        "cluster.groups.*.policies",
        "cluster.groups.*.learner.devices",
        *below("cluster", "backend batching"),
    ],
    "system/test_ray_folder.py": ["cluster.variables"],
    "training/test_ahead.py": ["cluster.on_update"],
    "training/test_async_and_placement.py": below("training", "async_depth placement"),
    "training/test_structured_output.py": [
        *below("agents.*.structured_output", "json_schema regex grammar"),
        *below("agents.*.sampling.structured_output", "json_schema regex grammar"),
        *below("evaluation.sampling.*.structured_output", "json_schema regex grammar"),
    ],
    "training/test_trainer.py": ["output_dir"],
    "training/test_training_schedules.py": ["agents.*.api.cache"],
    "trl_ext/learning/test_optimizers.py": below("agents.*", "load_in_4bit load_in_8bit"),
    "trl_ext/models/test_liger.py": ["training.use_liger_kernel"],
    "trl_ext/sharding/test_shards.py": ["training.async_save"],
    "trl_ext/trainer/test_narrow_sampling.py": ["ppo.engine_tis_mode", "training.on_void"],
    "verifier/test_client.py": below("reward.verifier", "urls api timeout retries concurrency on_failure"),
}
"""Options that a tiny run cannot show, because they need a server, an accelerator, a failure or the like, by the file of
tests that shows them."""
CRITIC = {"ppo.vf_coef": 1.0, "ppo.value_loss": "huber", "ppo.cliprange_value": 1e-4, "training.value_learning_rate": 1e-4,
          "training.detach_critic": True, "ppo.lam_alpha": 0.1, "ppo.lam_critic": 0.5, "ppo.critic_updates": 2, "training.critic_per_turn": False, "training.critic_context": "joint"}  # fmt: skip
UNREAD: dict[str, Case] = {
    "means": Case(GROUPS, {
        **CRITIC, "training.critic": "model", "agents.ann.critic": "model", "ppo.gamma": 0.5, "ppo.lam": 0.5, "ppo.whiten_rewards": True, "ppo.tis_cap": 2.0,
        **under("advantage", gamma=0.5, lam=0.5, ema=0.5, alpha=0.5), **under("branching", drafts=2, pick="sample", keep=1, choose="balanced"),
    }),
    "turns": Case({"advantage": {"returns": "turn_gae", "scale": "none", "key": ["agent"]}}, {"ppo.gamma": 0.5, "ppo.lam": 0.5, "ppo.whiten_rewards": True, "ppo.lam_alpha": 0.1, "ppo.lam_critic": 0.5}),
    "undivided": Case(merged(GROUPS, {"advantage": {"scale": "none"}}), under("advantage", ddof=0, eps=0.5)),
    "no critic": Case({"training": {"critic": "none"}}, {**CRITIC, "ppo.lam": 0.5}),
    "reinforce": Case(merged(GROUPS, {"ppo": {"objective": "reinforce"}}), under("ppo", cliprange=1e-4, cliprange_high=1e-4, dual_clip=1.001)),
    "dis": Case(merged(GROUPS, {"ppo": {"objective": "dis"}}), {"ppo.dual_clip": 1.001, "ppo.tis_cap": 0.9}),
    "no KL": Case({"ppo": {"kl_coef": 0.0}}, {"ppo.kl_in": "loss", "ppo.kl_estimator": "k3"}),
    "rules": Case({"reward": {"rules": ["own"]}}, under("reward", horizon="current", share="individual", discount=0.9)),
    "current": Case({"reward": {"horizon": "current"}}, {"reward.discount": 0.9}),
    "penalties": Case({"reward": {"penalties": {}}}, under("reward.penalties", call=1.0, call_unread=1.0, call_failed=1.0)),
    "no questions": Case({"evaluation": {"questions": 0}}, under("evaluation", temperature=1.0, top_p=0.5, top_k=2, sampling={"ann": {"top_p": 0.5}}), refused={"training.eval_steps": 1}),
    "frozen": Case({"agents": {"ann": {"trainable": False}}}, under("agents.ann", learning_rate=1e-4, critic="model")),
    "plain": Case({}, {
        "training.metric_for_best_model": "accuracy/turn_1",
        "advantage.eps": 0.5, "ppo.huber_delta": 0.01, "training.save_total_limit": 1, "training.role_gradients": 1, "training.balance": "role",
        **under("evaluation", top_p=0.5, top_k=2), **under("reward", brevity={"tokens": 3}, judgement={}, verifier={"tiny": TINY, "learn_every": 1}),
        **under("warm_start", batch_size=8, learning_rate=0.1, wrong=0.9, agents={"ann": {}}, calls=0.1),
        **under("cluster", batching="flow", on_update="drain", failures={"deadline": 5.0}),
        **under("agents.ann", call_format="json", call_texts={"intro": "a"}, limits={"calls": 1}),
    }),
    "rows": Case(loop(SFT) | {"updates": 100, "ppo": {"num_ppo_epochs": 4}, "training": {"learning_rate": None}}, {
        "advantage": {"scale": "none"}, "schedule": {"freeze": [{"agent": "ann", "first": 1, "last": 1}]}, "updates": 7,
        **under("ppo", num_ppo_epochs=2, num_mini_batches=2, kl_coef=0.1, objective="reinforce", aggregation="sequence_mean", cliprange=0.1,
                entropy_coef=0.1, vf_coef=1.0, gamma=0.5, lam=0.5),
        **under("training", learning_rate=0.1, value_learning_rate=0.1, critic="model", lr_scheduler_type="constant", warmup_steps=1, max_grad_norm=0.1, eval_steps=1),
        **under("agents.ann", learning_rate=0.1, critic="model"),
    }),
}  # fmt: skip
"""Runs in which nothing reads these options, so that ``check`` names them."""


def spread(dialogues, task):
    """Return a score from 0 to 1 of each answer that depends on all its characters, so that answers differ."""
    return [[sum(map(ord, u.text)) % 7 / 7 for u in d.utterances] for d in dialogues]


async def double(n: int) -> str:
    """Double a number.

    Args:
        n: the number
    """
    await asyncio.sleep(0.3 * (n == 7))
    if n == 9:
        raise RuntimeError("no")
    return str(2 * n) * 12


class Counter(Environment):
    """Counts up by a step. It takes long to count to 2."""

    def __init__(self, step=1):
        self.step = step

    def reset(self, seed, row):
        self.count = 0
        return "c"

    def tools(self, agent):
        async def up() -> int:
            """Count up."""
            self.count += self.step
            await asyncio.sleep(0.3 * (self.count == 2))
            return self.count

        return [Tool.of(up)]

    def reward(self):
        return float(self.count)


class Doors(Counter):
    """Says whether another one was opened at the same time."""

    both = threading.Barrier(2)

    def reset(self, seed, row):
        super().reset(seed, row)
        try:
            self.both.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            self.both.reset()
            return "alone"
        return "together"


class Shop:
    """A class as TRL's ``environment_factory`` takes it, with two numbers that may be its reward."""

    def reset(self, **row):
        self.sold, self.asked = 0, 0
        return " sale"

    def buy(self, count: int) -> str:
        """Buy pieces.

        Args:
            count: how many
        """
        self.sold, self.asked = self.sold + count, self.asked - 1
        return f"{self.sold} sold"


class Twice(Counter):
    """Counts up by twice as much."""

    def __init__(self, step=1):
        super().__init__(2 * step)


def treble(n: int) -> str:
    """Treble a number.

    Args:
        n: the number
    """
    return str(3 * n)


class Finder(Toolbox):
    """Has one tool, which says a prefix."""

    def __init__(self, prefix: str):
        self.prefix = prefix

    def tools(self):
        def find(what: str) -> str:
            """Find something.

            Args:
                what: what to find
            """
            return self.prefix + what

        return [Tool.of(find)]
