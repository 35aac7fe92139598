"""Check data, tokenizers, lengths, the disk and transformers' own options, without loading a model.

``maporl check`` and the start of every run call this.
"""

import inspect
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import SchedulerType, get_scheduler, training_args
from transformers.integrations import get_reporting_integration_callbacks
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from maporl.advantages.baselines import baseline_of
from maporl.config.backends import BACKENDS
from maporl.config.imports import extension, unknown
from maporl.config.schema import AgentSection, Config, TrainingOptions
from maporl.engines import choice
from maporl.errors import ConfigError, Fault, UserError, each, install_command, one_line, refuse, refused
from maporl.playground.teacher import check_taught, taught_calls
from maporl.protocols import policy_names
from maporl.rewards.credited import credit_lines
from maporl.rewards.own_code import check_reward_functions, own_task_warnings
from maporl.rollout.ablation import left_out
from maporl.rollout.branching import BRANCHINGS
from maporl.rollout.tool_checks import OfferedTools
from maporl.run import ResolvedRun, each_algorithm
from maporl.tasks import Mixture, Task, counts
from maporl.team import memory, model_checks
from maporl.team.loading import base_owners, split
from maporl.team.memory import adapter_parameters, shape_of
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.check import unread
from maporl.training.doubts import doubts, narrow_sampling
from maporl.training.learns_from import facts_of, learns_from, who_learns
from maporl.training.lonely import lonely_groups
from maporl.validation.rehearsal import Measured, Rehearsal, check_any_agent, findings
from trl_ext.errors import retold
from trl_ext.models.shape import training_bytes
from trl_ext.ppo.options import rate_of
from trl_ext.process import distributed
from trl_ext.process.devices import accelerator, accelerators, main_bytes, total_bytes
from trl_ext.process.threads import choose


def training_arguments(config: Config) -> MultiAgentPPOConfig:
    """Return the trainer's arguments, after checking what transformers would only refuse during training.

    Raises:
        ConfigError: transformers refuses an option, or a package that an option needs is not installed.
        ArgumentError: an objective of the user's own fails, or returns something else than it should.
    """
    alike = {str(own.training): own.training for own in (config, *map(config.of, config.agents))}
    refuse(fault for training in alike.values() for fault in _options(training))
    with retold(ValueError, lambda error: ConfigError(f"training: {one_line(error)}"), but=UserError):
        return MultiAgentPPOConfig.from_config(config)


def _training(run: ResolvedRun) -> Iterator[Fault]:
    """Yield options of the training that transformers refuses, now or during training."""
    yield from list(each_algorithm(_options_alone, run)) or [
        *refused(lambda: training_arguments(run.config)),
        *_rates(run),
    ]


def _rates(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the schedule cannot be made for a rate, such as one below the end that it falls to."""
    for name, facts in planned_learners(run).items() if not run.config.stages else ():
        training = run.config.of(facts["agents"][0]).training
        for part in ("learning_rate", "critic_learning_rate"):
            for fault in _schedule(training, facts[part]) if facts[part] else ():
                what = f"{fault.what} (policy {name!r}, {part.replace('_', ' ')} {facts[part]:g})"
                yield replace(fault, what=what)
                return


def _options_alone(run: ResolvedRun) -> Iterator[Fault]:
    """Yield as :func:`_training` does, and build no arguments of a trainer that exists."""
    yield from _options(run.config.training)


def _options(training: TrainingOptions) -> Iterator[Fault]:
    """Yield options that transformers would only refuse during training, and packages that one needs and lacks."""
    yield from _schedule(training)
    yield from _bf16(training)
    if "8bit" in training.optim and find_spec("bitsandbytes") is None:
        what = f"{training.optim} needs the package bitsandbytes"
        yield Fault("training.optim", what, f"install it with: {install_command('quantized')}")
    try:
        for callback in get_reporting_integration_callbacks(_reports(training.report_to)):
            callback()  # raises an error if its package is not installed
    except (ValueError, RuntimeError, ImportError, AssertionError) as error:
        yield Fault("training.report_to", f"{training.report_to} cannot be reported to: {one_line(error)}")


def _bf16(training: TrainingOptions) -> Iterator[Fault]:
    """Yield that the device does not compute in bfloat16, where mixed precision is asked for."""
    # transformers refuses it too, but names a setting of its own and not the device
    if not training.bf16 or training.use_cpu or training_args.is_torch_bf16_gpu_available():
        return
    kind, key, remedy = accelerator(), "training.bf16", "set training.bf16: false"
    if kind is None:
        remedy += ", or training.use_cpu: true to compute in bfloat16 on the CPU"
        yield Fault(key, "no accelerator was found", remedy)
    else:
        yield Fault(key, f"this {kind.type} device does not compute in bfloat16", remedy)


def _reports(names: list[str]) -> list[str] | str:
    """Return ``report_to`` as ``TrainingArguments`` reads it: "all" and "none" are texts and not lists."""
    return names[0] if names in (["all"], ["none"]) else names


def _schedule(training: TrainingOptions, rate: float = 1.0) -> Iterator[Fault]:
    """Yield that the schedule of the learning rate does not exist, lacks options that it needs, or cannot step."""
    name, options = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    names = [kind.value for kind in SchedulerType]
    if name not in names:
        yield Fault("training.lr_scheduler_type", unknown(name, names))
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    try:
        maker: Callable[..., Any] = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]  # type: ignore[assignment]  # of functions
        inspect.signature(maker).bind_partial(**options)
        schedule = get_scheduler(name, optimizer, 0, 1, options)
        optimizer.step()
        schedule.step()
    except (ValueError, TypeError, ArithmeticError) as error:
        what = f"{name} cannot be used with lr_scheduler_kwargs {options}: {one_line(error)}"
        yield Fault("training.lr_scheduler_type", what)


def check_run(config: Config, ask_servers: bool = True) -> list[str]:
    """Check everything that can be checked without loading a model. Return the findings as lines of text.

    Args:
        config: the configuration.
        ask_servers: whether the servers that it names are asked for a sign of life.

    Raises:
        ConfigError: the run cannot start. It says what is wrong in any part that is read before the run is rehearsed.
    """
    return check_resolved(ResolvedRun(config), ask_servers)


def check_resolved(run: ResolvedRun, ask_servers: bool = True, has_trainer: bool = False) -> list[str]:
    """Check a run as :func:`check_run` does, whose parts a Python program may have made.

    ``has_trainer`` says that its trainer exists. Its arguments are not built a second time then, because that would
    take the devices from it.

    Raises:
        ConfigError: the run cannot start, as for :func:`check_run`.
    """
    config, tools = run.config, OfferedTools(run)
    task_warnings = refuse(_faults(run, tools, ask_servers, has_trainer))
    task, held_out, world = run.task, run.held_out, tools.world
    rehearsal = Rehearsal(run, world)
    check_any_agent(rehearsal)
    check_taught(run, world)
    refuse(taught_calls(run, tools.may_call))
    measured = Measured(rehearsal, tools.tokenizers, tools.may_call)
    warnings, longest, steps = refuse(measured.faults()), measured.longest, measured.steps
    dialogues, longer = (BRANCHINGS[config.branching.how].dialogues(config.branching, s) for s in (steps, [*steps, 1]))
    evaluation = f"{len(held_out)} held out" if held_out is not None else "no evaluation"
    return [
        f"task {config.task['name']}: {len(task)} questions, {evaluation}",
        *(line for split in run.splits if (line := split.remark())),
        f"agents: {', '.join(f'{n} ({_describe(a)})' for n, a in config.agents.items())}",
        memory.line(run, longest, dialogues),
        *memory.device_lines(
            run, longest, dialogues, main_bytes() if memory.training_on_cpu(config) else total_bytes()
        ),
        str(choose(config.tiny)),
        *_launch_line(config),
        *backend_lines(run, measured),
        *_run_lines(config, dialogues, f", if a dialogue takes {len(steps)} steps" if longer > dialogues else "", task),
        *tools.lines(),
        *(() if config.stages else learned_from(run)),
        *credit_lines(config.reward, run.protocol, run.learners, measured.dialogues),
        *warnings,
        *task_warnings,
        *refuse(each((unread, lambda _: findings(rehearsal), lambda _: _ppo_faults(rehearsal), doubts), run)),
        *(() if config.stages else (*narrow_sampling(run), *_small_data(config, task))),
        *_fewer_questions(config, held_out),
    ]


def learned_from(run: ResolvedRun) -> list[str]:
    """Return in plain sentences what a run by PPO learns from, as it will be built."""
    config, turns = run.config, run.protocol.turns
    schedule = config.schedule.resolved(turns, run.agents)
    told = [who_learns(schedule, tuple(run.learners), run.speakers, turns, config.updates)] if run.learners else []
    algorithms = [(own.learners, own.config.advantage, own.config.ppo) for own in run.by_algorithm()]
    return [*told, *learns_from(config.reward, algorithms, config.branching, config.ppo, planned_learners(run))]


def planned_learners(run: ResolvedRun) -> dict[str, dict[str, Any]]:
    """Return what each policy that is trained will be (:func:`maporl.training.learns_from.facts_of`)."""
    config = run.config
    spoken = defaultdict(list)
    for name, agent in config.agents.items():
        if agent.weights and agent.trainable:
            for policy in policy_names(name, agent, config):
                spoken[policy].append(name)
    planned = {}
    for policy, agents in spoken.items():
        section = config.agents[agents[0]]
        adapter = bool(section.lora or section.adapter)
        own, advantages = config.of(agents[0]), {name: config.of(name).advantage for name in agents}
        reads_values = any(baseline_of(advantage).needs_critic for advantage in advantages.values())
        critic, training = own.training.critic if reads_values else "none", own.training
        made = {
            "learning_rate": rate_of(training.learning_rate, adapter=adapter),
            "critic": "" if critic == "none" else critic,
            "critic_learning_rate": rate_of(training.value_learning_rate, training.learning_rate, adapter=adapter),
            "objective": own.ppo.objective,
        }
        planned[policy] = facts_of(
            made, agents, adapter, own.ppo, section.learns_by.of_policy, advantages, run.sampling, run.learners
        )
    return planned


def _ppo_faults(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield what PPO reads and a loop does not: its groups."""
    if not rehearsal.run.config.stages:
        yield from lonely_groups(rehearsal.grouping())


def _launch_line(config: Config) -> list[str]:
    """Return a line if this process would leave accelerators of the machine idle."""
    idle = len(accelerators()) - 1
    alone = not config.grouped and config.training.placement == "shared" and distributed.size() == 1
    if not alone or config.training.use_cpu or idle < 1:
        return []
    return [
        f"processes: 1, and this machine has {idle + 1} accelerators: to use all, accelerate launch --config_file "
        f"configs/accelerate/multi_gpu.yaml --num_processes {idle + 1} train_multi_agent.py --config FILE"
    ]


def _run_lines(config: Config, dialogues: int, condition: str, task: Task) -> list[str]:
    """Return how much is played: updates, questions, and the dialogues of a question, on a ``condition`` or always."""
    if config.stages:
        return extension("maporl.loops.plan:loop_lines", "loop.stages")(config, dialogues, condition, len(task))
    questions = config.questions_per_update()
    each = f", {dialogues} dialogues for each ({questions * dialogues} in an update{condition})"
    branched = "" if dialogues == 1 else each
    if config.branching.ablate is not None:
        again = len(left_out(config.branching.ablate)) * config.branching.ablate.samples
        branched += f", each played {again} more time{'s' if again > 1 else ''} without agents"
    return [f"run: {config.updates} updates of {questions} questions{branched} into {config.output_dir}"]


def _small_data(config: Config, task: Task) -> list[str]:
    questions = config.questions_per_update()
    if questions <= len(task):
        return []
    return [
        f"warning: an update has {questions} questions, and the training split {len(task)}, so some are asked several "
        "times; set a smaller training.per_device_train_batch_size or gradient_accumulation_steps"
    ]


def _fewer_questions(config: Config, held_out: Task | None) -> list[str]:
    if held_out is None or config.evaluation.questions <= len(held_out):
        return []
    return [
        f"warning: evaluation.questions={config.evaluation.questions}, but {len(held_out)} are held out; they are all "
        "used"
    ]


def _writing(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the run's folder cannot be made and written to. An empty folder is made there and removed."""
    folder = Path(run.config.output_dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(prefix=".maporl-check-", dir=there):
            pass
    except OSError as error:
        what = f"{str(folder)!r} cannot be written: nothing can be made in {str(there)!r} ({error.strerror})"
        yield Fault("output_dir", what, "give another output_dir")


def _placement(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that there are not enough devices for every base model, if ``placement`` is split."""
    config = run.config
    if config.training.placement == "shared":
        return
    try:
        split(list(base_owners(config).values()), config.training.use_cpu)
    except ValueError as error:
        yield Fault.of(ValueError(f"training.{error}"))


def _loop(run: ResolvedRun) -> Iterator[Fault]:
    """Yield the stages of a loop that do not fit."""
    if run.config.stages:
        yield from extension("maporl.loops.plan:faults", "loop.stages")(run.config)


def backend_lines(run: ResolvedRun, measured: Measured | None = None) -> list[str]:
    """Return what the run is where it trains, if that is not here, as lines of text. ``measured`` are its prompts."""
    if not run.config.grouped:
        return []
    name = run.config.cluster.backend
    lines: list[str] = extension(BACKENDS[name].lines, f"cluster.backend: {name}")(run, measured)
    return lines


def check_backends(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why the run cannot be trained where it says, and what it says of backends that it does not use."""
    cluster = run.config.cluster
    placed = any(agent.tinker is not None for agent in run.config.agents.values())
    for name, backend in BACKENDS.items() if cluster is not None and (placed or cluster != type(cluster)()) else ():
        try:
            check = extension(backend.check, f"cluster.backend: {name}")
        except ConfigError:
            if name == cluster.backend:
                raise
        else:
            yield from check(run)


PARTS = (_training, check_backends, _writing, _placement, choice.check, model_checks.check, _loop)
"""What is checked without data, tokenizers and tools, in this order."""


def _faults(run: ResolvedRun, tools: OfferedTools, ask_servers: bool, has_trainer: bool) -> Iterator[Fault]:
    """Yield what is wrong with a run before it is rehearsed, and warnings of a task of the user's own.

    Raises:
        ConfigError: data or a tokenizer cannot be read, or code of the user's own breaks its contract.
    """
    parts = [_options_alone if part is _training and has_trainer else part for part in PARTS]
    verifier, agents = run.config.reward.verifier, run.config.agents.values()
    if ask_servers and (verifier is not None or any(agent.api or agent.vllm for agent in agents)):
        from maporl.validation import servers  # with clients that other runs do not need

        parts.append(servers.check)
    yield from each(parts, run)
    unread = [*refused(lambda: run.task), *refused(lambda: run.held_out), *refused(lambda: tools.tokenizers)]
    yield from unread
    if unread:
        return  # the rest reads them
    yield from check_disk(run)
    yield from own_task_warnings(run)
    counted = counts.count_data(run.task, run.held_out, run.config.evaluation.questions, run.curriculum)
    yield from counts.faults(counted, run.config.task["name"], "label" in run.config.reward.asked)
    check_reward_functions(run)
    yield from model_checks.check_alphabets(run)
    if verifier is not None:
        yield from extension("maporl.verifier.check:lengths", "reward.verifier")(run)
    for task in run.task.parts.values() if isinstance(run.task, Mixture) else [run.task]:
        yield from refused(partial(run.protocol.check_example, task[0]))
    yield from tools.faults()


def _describe(agent: AgentSection) -> str:
    if not agent.weights:
        return agent.engine if agent.api is None else f"{agent.api.model} by API"
    what = f"tiny {agent.tiny.architecture}" if agent.tiny else str(agent.model)
    here = agent.vllm is not None and agent.vllm.colocate is not None
    engine = (
        "" if agent.engine == AgentSection.engine else f", engine {agent.engine}{' in this process' if here else ''}"
    )
    return what + (f" + LoRA r={agent.lora.r}" if agent.lora else "") + ("" if agent.trainable else ", frozen") + engine


SPARE = 0.2e9
"""Bytes beside weights: metrics, dialogues, the report."""


def check_disk(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the disk is too full: an error if the final weights do not fit, a warning if checkpoints do not."""
    config = run.config
    weights, checkpoint = _sizes(config)
    kept = _checkpoints(config)
    final = weights + SPARE
    needed = final + kept * checkpoint
    folder = Path(config.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return
    remedy = "make room, or give another output_dir"
    if kept and free >= final:
        remedy = f"set training.save_total_limit: 1 or training.save_steps: 0 (no checkpoints), {remedy}"
    what = (
        f"the disk of {str(there)!r} has {_gigabytes(free)} free, and the run writes about {_gigabytes(needed)} there "
        f"({_gigabytes(final)} at its end, and {kept} checkpoint{'' if kept == 1 else 's'} of {_gigabytes(checkpoint)})"
    )
    yield Fault("output_dir", what, remedy, "warning" if free >= final else "error")


def _sizes(config: Config) -> tuple[float, float]:
    """Return the bytes of the trained weights of all policies, and of a checkpoint with their optimizer."""
    weights = checkpoint = 0.0
    seen: set[str] = set()
    for name, section in config.agents.items():
        if not section.weights or not section.trainable:
            continue
        for policy in set(policy_names(name, section, config)) - seen:
            seen.add(policy)
            shape = shape_of(section)
            adapter = section.lora is not None or section.adapter is not None
            trained = adapter_parameters(section) if adapter else shape.parameters
            weights += trained * shape.bytes
            each = training_bytes(shape.bytes, config.training.optim)
            checkpoint += trained * (shape.bytes + each.copy + each.moments)
    return weights, checkpoint


def _checkpoints(config: Config) -> int:
    """Return how many checkpoints are there at the end."""
    every = config.training.save_steps
    if not every or config.stages:
        return 0
    made = -(-config.updates // every)  # one after the last update too
    return min(made, config.training.save_total_limit or made)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
