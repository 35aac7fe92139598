"""Check data, tokenizers, lengths and transformers' own options, without loading a model.

``maporl check`` and the start of every run call this.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import SchedulerType, get_scheduler, training_args
from transformers.integrations import get_reporting_integration_callbacks
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from maporl.advantages.baselines import baseline_of
from maporl.advantages.scales import scale_of
from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.config.schema import AgentSection, Config, RewardSection, TrainingOptions
from maporl.engines import Engine, Reply, Request
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError, install_command
from maporl.protocols import build_protocol, speakers
from maporl.rollout.branching import BRANCHINGS
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks import Task, build_task
from maporl.team.devices import split
from maporl.team.loading import base_owners, context_length, load_tokenizers
from maporl.team.sampling import team_sampling
from maporl.training.args import MultiAgentPPOConfig
from maporl.types import Dialogue
from maporl.validation import memory
from maporl.validation.credited import credit_lines
from maporl.validation.engine_choice import check_weight_transfer
from maporl.validation.model_checks import check_alphabets, check_attention, check_lora
from maporl.validation.rehearsal import check_groups, check_hearing, check_questions
from maporl.validation.task_checks import check_own_task, check_reward_functions, label_warnings
from maporl.validation.taught import check_taught, check_taught_calls
from maporl.validation.threads import threads_of
from maporl.validation.tool_checks import check_tools
from trl_ext.chat import Tokenizer
from trl_ext.devices import accelerator
from trl_ext.free_memory import main_bytes, total_bytes
from trl_ext.ppo_options import GREEDY, Decoding

LARGE_RATE = 0.1
"""A learning rate above it is a slip: no language model learns with it."""


def training_arguments(config: Config) -> MultiAgentPPOConfig:
    """Return the trainer's arguments, after checking what transformers would only refuse during training.

    Raises:
        ConfigError: transformers refuses an option, or a package that an option needs is not installed.
    """
    training = config.training
    _check_schedule(training)
    _check_bf16(training)
    if "8bit" in training.optim and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"training.optim: {training.optim} needs the package bitsandbytes; install it with: {install_command('quantized')}"
        )
    try:
        for callback in get_reporting_integration_callbacks(_reports(training.report_to)):
            callback()  # raises an error if its package is not installed
    except (ValueError, RuntimeError, ImportError, AssertionError) as error:
        raise ConfigError(
            f"training.report_to: {training.report_to} cannot be reported to: {' '.join(str(error).split())}"
        ) from None
    try:
        return MultiAgentPPOConfig.from_config(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"training: {' '.join(str(error).split())}") from None


def _check_bf16(training: TrainingOptions) -> None:
    """Check that the device computes in bfloat16 where mixed precision is asked for.

    transformers refuses it too, but names a setting of its own and not the device.
    """
    if not training.bf16 or training.use_cpu or training_args.is_torch_bf16_gpu_available():
        return
    kind = accelerator()
    if kind is None:
        raise ConfigError(
            "training.bf16: no accelerator was found; set training.bf16: false, or training.use_cpu: true to compute in bfloat16 "
            "on the CPU"
        )
    raise ConfigError(f"training.bf16: this {kind.type} device does not compute in bfloat16; set training.bf16: false")


def _reports(names: list[str]) -> list[str] | str:
    """Return ``report_to`` as ``TrainingArguments`` reads it: "all" and "none" are texts and not lists."""
    return names[0] if names in (["all"], ["none"]) else names


def _check_schedule(training: TrainingOptions) -> None:
    """Check that the schedule of the learning rate exists, has the options that it needs, and can step."""
    name, options = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    known = [kind.value for kind in SchedulerType]
    if name not in known:
        raise ConfigError(f"training.lr_scheduler_type: {unknown(name, known)}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        maker: Callable[..., Any] = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]  # type: ignore[assignment]  # of functions
        inspect.signature(maker).bind_partial(**options)
        schedule = get_scheduler(name, optimizer, 0, 1, options)
        optimizer.step()
        schedule.step()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"training.lr_scheduler_type: {name} cannot be used with lr_scheduler_kwargs {options}: "
            f"{' '.join(str(error).split())}"
        ) from None


def tasks_of(config: Config) -> tuple[Task, Task | None]:
    """Read the training split, and the evaluation split unless ``evaluation.questions`` is 0.

    Raises:
        ConfigError: a split is empty or cannot be read.
    """
    task = build_task(config.task, "train", config.seed)
    if len(task) == 0:
        raise ConfigError("task: the training split is empty")
    held_out = build_task(config.task, "eval", config.seed) if config.evaluation.questions else None
    if held_out is not None and len(held_out) == 0:
        raise ConfigError("task: the evaluation split is empty; set evaluation.questions to 0 to do without")
    return task, held_out


def check_run(config: Config) -> list[str]:
    """Check everything that can be checked without loading a model. Return the findings as lines of text.

    Raises:
        ConfigError: the run cannot start.
    """
    training_arguments(config)
    _check_writing(Path(config.output_dir))
    task, held_out = tasks_of(config)
    tokenizers = load_tokenizers(config)
    splits = [split for split in (task, held_out) if split is not None]
    _check_placement(config)
    check_weight_transfer(config)
    check_lora(config)
    check_attention(config)
    own_warnings = check_own_task(config, splits)
    check_reward_functions(config, splits)
    check_alphabets(config, splits)
    world, tools, tool_lines = check_tools(config, tokenizers, task[0])
    check_taught(config, task, world)
    check_taught_calls(config, task, tools)
    warnings, longest, steps, played = _check_lengths(config, splits, tokenizers, world, tools)
    dialogues, longer = (BRANCHINGS[config.branching.how].dialogues(config.branching, s) for s in (steps, [*steps, 1]))
    evaluation = f"{len(held_out)} held out" if held_out is not None else "no evaluation"
    return [
        f"task {config.task['name']}: {len(task)} questions, {evaluation}",
        *(line for split in splits if (line := split.remark())),
        f"agents: {', '.join(f'{n} ({_describe(a)})' for n, a in config.agents.items())}",
        memory.line(config, longest, dialogues),
        *memory.device_lines(
            config, longest, dialogues, main_bytes() if memory.training_on_cpu(config) else total_bytes()
        ),
        str(threads_of(config)),
        _run_line(config, dialogues, f", if a dialogue takes {len(steps)} steps" if longer > dialogues else ""),
        *tool_lines,
        *_narrow_sampling(config),
        *credit_lines(config.reward, build_protocol(config.protocol, tuple(config.agents)), _learners(config), played),
        *warnings,
        *own_warnings,
        *label_warnings(config, splits),
        *check_questions(config, task),
        *_small_data(config, task),
        *check_groups(config, task, world),
        *check_hearing(config, task, world),
        *method_warnings(config),
        *_fewer_questions(config, held_out),
    ]


def _learners(config: Config) -> list[str]:
    """Return the agents that play and are trained."""
    playing = speakers(config.protocol, tuple(config.agents))
    return [name for name in playing if config.agents[name].trainable and config.agents[name].weights]


def _run_line(config: Config, dialogues: int, condition: str) -> str:
    """Return how much is played: updates, questions, and the dialogues of a question, on a ``condition`` or always."""
    questions = config.questions_per_update()
    each = f", {dialogues} dialogues for each ({questions * dialogues} in an update{condition})"
    branched = "" if dialogues == 1 else each
    return f"run: {config.updates} updates of {questions} questions{branched} into {config.output_dir}"


def _narrow_sampling(config: Config) -> list[str]:
    """Return a line if training samples from less than the whole distribution, which is the one that is trained."""
    ppo = config.ppo
    own = [line for agent in _learners(config) if (line := _narrow_agent(config, agent))]
    if ppo.decoding == Decoding(ppo.temperature):
        return own
    line = (
        f"sampling: ppo.top_p={ppo.top_p:g} and ppo.top_k={ppo.top_k} narrow what answers are sampled from. PPO trains the "
        f"whole distribution at temperature {ppo.temperature:g}: old, new and reference log-probabilities are all taken there, "
        "so ratios begin at 1"
    )
    if ppo.engine_tis_cap is None:
        line += "; ppo.engine_tis_cap would weigh each token by its whole probability over that of sampling it"
    without = [name for name, agent in config.agents.items() if not ENGINES[agent.engine].top_k]
    uncut = f"; agents {', '.join(without)}: their engines have no top_k" if ppo.top_k and without else ""
    return [line + uncut, *own]


def _narrow_agent(config: Config, agent: str) -> str:
    """Return a line if the own sampling of ``agent``, or that of its role, is narrower than what is trained, or ""."""
    sampling = team_sampling(config)
    places = {f"agents.{agent}.sampling": sampling.agents.get(agent)}
    role = config.agents[agent].role
    if role is not None:
        places[f"protocol.sampling.{role}"] = sampling.roles.get(role)
    narrow = [
        f"{place}.{key}={value:g}"
        for place, own in places.items()
        for key, full in (("top_p", 1), ("top_k", 0))
        for value in (own.every(key) if own is not None else [])
        if value != full
    ]
    if not narrow:
        return ""
    line = (
        f"sampling: {', '.join(dict.fromkeys(narrow))}: agent {agent} samples from a narrower distribution than the one that "
        "is trained"
    )
    corrects = f"ppo.engine_tis_cap={config.ppo.engine_tis_cap} corrects for it"
    return f"{line}; {'ppo.engine_tis_cap would correct for it' if config.ppo.engine_tis_cap is None else corrects}"


def method_warnings(config: Config) -> list[str]:
    """Return a warning for each choice that works but hardly ever is what was meant."""
    advantage, ppo = config.advantage, config.ppo
    baseline = baseline_of(advantage)
    found = []
    if baseline.scales_mean and scale_of(advantage).over != "nothing":
        found.append(
            f"warning: advantage: baseline {advantage.baseline} with scale {advantage.scale} is baseline mean, times n / (n - 1) "
            "for groups of n rows; set advantage.scale: none (RLOO), or advantage.baseline: mean (GRPO)"
        )
    if ppo.ratio != "token" and ppo.aggregation == "token_mean":
        found.append(
            f"warning: ppo: ratio {ppo.ratio} with aggregation token_mean weighs an answer by its length, although all its "
            "tokens have one ratio; set ppo.aggregation: sequence_mean"
        )
    evaluation = config.evaluation
    if evaluation.temperature == 0 and evaluation.decoding != GREEDY:
        found.append(
            "warning: evaluation: top_p and top_k change nothing at temperature 0, which always takes the likeliest token; set "
            "evaluation.temperature above 0, or remove them"
        )
    if config.training.learning_rate > LARGE_RATE:
        found.append(
            f"warning: training.learning_rate: AdamW moves each weight by up to {config.training.learning_rate:g} in one step; "
            "1e-6 to 1e-3 is usual"
        )
    if config.reward.sources.get("label", 1.0) < 0:
        found.append(
            f"warning: reward.sources: label has the weight {config.reward.sources['label']:g}, so right answers cost"
        )
    plain = RewardSection()
    inert = [n for n in ("horizon", "share", "discount") if getattr(config.reward, n) != getattr(plain, n)]
    if config.reward.rules and inert:
        found.append(
            f"warning: reward: {' and '.join(inert)} change nothing beside reward.rules; remove one or the other"
        )
    hears_others = build_protocol(config.protocol, tuple(config.agents)).hears_others
    if config.training.critic_context == "joint" and baseline.needs_critic and not hears_others:
        found.append(
            "warning: training.critic_context: joint lets the critic read what all agents said before, but in this protocol "
            "all agents speak once, at the same time; set protocol.turns to 2 or more, or critic_context: answer"
        )
    return found


def _small_data(config: Config, task: Task) -> list[str]:
    questions = config.questions_per_update()
    if questions <= len(task):
        return []
    return [
        f"warning: an update has {questions} questions, and the training split {len(task)}, so some are asked several times; "
        "set a smaller training.per_device_train_batch_size or gradient_accumulation_steps"
    ]


def _fewer_questions(config: Config, held_out: Task | None) -> list[str]:
    if held_out is None or config.evaluation.questions <= len(held_out):
        return []
    return [
        f"warning: evaluation.questions={config.evaluation.questions}, but {len(held_out)} are held out; they are all used"
    ]


def _check_writing(folder: Path) -> None:
    """Check that the run's folder can be made and written to, by making an empty folder there and removing it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(prefix=".maporl-check-", dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir: {str(folder)!r} cannot be written: nothing can be made in {str(there)!r} ({error.strerror}); give "
            "another output_dir"
        ) from None


def _check_placement(config: Config) -> None:
    """Check that there are enough devices for every base model if ``placement`` is split."""
    if config.training.placement == "shared":
        return
    try:
        split(list(base_owners(config).values()), config.training.use_cpu)
    except ValueError as error:
        raise ConfigError(f"training.{error}") from None


class _Silent(Engine):
    """An engine that gives empty answers, so that every prompt is as short as possible. It records prompts' lengths."""

    def __init__(self, tokenizers: dict[str, Tokenizer]):
        self.tokenizers = tokenizers
        self.prompts: list[tuple[Request, int]] = []

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return an empty answer for each request. Agents without a tokenizer, such as people, are not measured."""
        for request in (r for r in requests if r.ask.agent in self.tokenizers):
            tokenizer = self.tokenizers[request.ask.agent]
            prompt = request.transcript.add_messages(request.messages, tokenizer, frozenset())
            request.transcript.add_completion(request.utterance, [], ended=False)
            self.prompts.append((request, len(prompt)))
        return [Reply("") for _ in requests]


def _context(name: str, agent: AgentSection) -> int | None:
    """Return the most tokens that the agent's model reads, and vLLM in this process if it samples. None has no limit."""
    limits = [context_length(name, agent)]
    if agent.vllm is not None and agent.vllm.colocate is not None:
        limits.append(agent.vllm.colocate.max_model_len)
    return min((limit for limit in limits if limit is not None), default=None)


def _check_lengths(
    config: Config,
    splits: Sequence[Task],
    tokenizers: dict[str, Tokenizer],
    world: World,
    tools: Mapping[str, AgentTools],
) -> tuple[list[str], int, list[int], list[Dialogue]]:
    """Check that prompts fit the models' contexts if every answer is empty.

    Returns:
        Warnings for prompts that do not fit if answers are as long as possible, the length of the longest conversation
        then, in tokens, the number of utterances of each step of the longest dialogue, and the dialogues.
    """
    names = tuple(config.agents)
    players = speakers(config.protocol, names)
    silent = _Silent(tokenizers)
    protocol = build_protocol(config.protocol, names)
    sections = {name: config.agents[name] for name in players}
    specs = {
        name: SpeakerSpec("silent", (name,), system=a.system, role=a.role, tools=tools.get(name))
        for name, a in sections.items()
    }
    most_played = 2 if world.environments else 16
    steps: list[int] = []
    played: list[Dialogue] = []
    for task in splits:
        by_length = sorted(task, key=lambda example: len(task.question(example)))
        driver = RolloutDriver(task, protocol, specs, {"silent": silent}, GREEDY, world=world)
        played += driver.play(by_length[-most_played:])
    for dialogue in played:
        steps = max(steps, list(Counter(u.order for u in dialogue.utterances).values()), key=len)
    contexts = {name: _context(name, config.agents[name]) for name in players if name in tokenizers}
    sampling = team_sampling(config)
    most_of = {name: sampling.longest(name, config.ppo.response_length) for name in players}
    most = max(most_of.values())
    longer: dict[str, int] = {}
    longest = 0
    for request, length in silent.prompts:
        agent, context = request.ask.agent, contexts[request.ask.agent]
        answers = len(players) * most * (1 if request.ask.fresh else request.turn)
        own = most_of.get(agent, most)
        limit = "ppo.response_length" if own == config.ppo.response_length else "max_tokens of its sampling"
        longest = max(longest, length + answers + own)
        if not length:
            heard = [u.agent for u in request.heard]
            raise ConfigError(
                f"agents.{agent}: its prompt of turn {request.turn + 1} is empty if "
                f"{'the answers of ' + ', '.join(heard) if heard else 'earlier answers'} are empty, and a model cannot answer nothing; "
                f"put a text of its own into what protocol {protocol.label} asks, beside what others said"
            )
        if context is None:
            continue
        if length + own > context:
            which = f"a prompt of turn {request.turn + 1} has at least" if request.turn else "a first prompt has"
            by = "" if context == context_length(agent, config.agents[agent]) else " (vllm.colocate.max_model_len)"
            raise ConfigError(
                f"agents.{agent}: {which} {length} tokens and answers may have {own} ({limit}), but its "
                f"model reads at most {context}{by}; shorten the protocol's texts "
                f"or {limit}, or use another model; question: {request.example.question!r:.80}"
            )
        if length + answers + own > context:
            longer[agent] = max(longer.get(agent, 0), length + answers + own)
    warnings = _unread(config, silent) + [
        f"warning: agents.{agent}: its last turn may need about {length} tokens if all answers are as long as "
        f"{_limit(config, most)} allows, but its model reads at most {contexts[agent]}; a run stops where it does not fit"
        for agent, length in longer.items()
    ]
    return warnings, longest, steps, played


def _limit(config: Config, most: int) -> str:
    """Return the name and the value of the option that lets answers have ``most`` tokens."""
    name = "ppo.response_length" if most == config.ppo.response_length else "max_tokens of the agents' sampling"
    return f"{name}={most}"


def _unread(config: Config, silent: _Silent) -> list[str]:
    """Return a warning for each tiny model whose prompts have characters that its alphabet lacks."""
    used: dict[str, set[str]] = {}
    for request, _ in silent.prompts:
        used.setdefault(request.ask.agent, set()).update(*(message["content"] for message in request.ask.messages))
    tinies = {name: config.agents[name].tiny for name in used}
    missing = {name: used[name] - set(tiny.alphabet) for name, tiny in tinies.items() if tiny is not None}
    return [
        f"warning: agents.{name}.tiny.alphabet: its prompts have characters that it lacks, {''.join(sorted(lacking))!r:.60}; they "
        "are read as unknown: add them, or shorten the protocol's texts"
        for name, lacking in missing.items()
        if lacking
    ]


def _describe(agent: AgentSection) -> str:
    if not agent.weights:
        return agent.engine if agent.api is None else f"{agent.api.model} by API"
    what = f"tiny {agent.tiny.architecture}" if agent.tiny else str(agent.model)
    here = agent.vllm is not None and agent.vllm.colocate is not None
    engine = (
        "" if agent.engine == AgentSection.engine else f", engine {agent.engine}{' in this process' if here else ''}"
    )
    return what + (f" + LoRA r={agent.lora.r}" if agent.lora else "") + ("" if agent.trainable else ", frozen") + engine
