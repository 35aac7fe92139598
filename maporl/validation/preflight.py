"""Check data, tokenizers, lengths and transformers' own options, without loading a model.

``maporl check`` and the start of every run call this.
"""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import SchedulerType, get_scheduler, training_args
from transformers.integrations import get_reporting_integration_callbacks
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from maporl.backends.check import check_cluster
from maporl.config.imports import unknown
from maporl.config.schema import AgentSection, Config, TrainingOptions
from maporl.config.threads import threads_of
from maporl.engines import choice
from maporl.errors import ConfigError, install_command, one_line, refuse
from maporl.loops.plan import check_loop
from maporl.playground.checks import check_taught, check_taught_calls
from maporl.rewards.credited import credit_lines
from maporl.rewards.own_code import check_own_task, check_reward_functions, label_warnings
from maporl.rollout.ablation import left_out
from maporl.rollout.branching import BRANCHINGS
from maporl.rollout.tool_checks import check_tools
from maporl.run import ResolvedRun
from maporl.tasks import Mixture, Task
from maporl.team import memory, model_checks
from maporl.team.devices import split
from maporl.team.loading import base_owners, load_tokenizers
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.method_warnings import method_warnings, narrow_sampling
from maporl.validation.rehearsal import Measured, Rehearsal, check_any_agent, findings, lonely_groups
from trl_ext.process.devices import accelerator, main_bytes, total_bytes


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
            f"training.optim: {training.optim} needs the package bitsandbytes; install it with: "
            f"{install_command('quantized')}"
        )
    try:
        for callback in get_reporting_integration_callbacks(_reports(training.report_to)):
            callback()  # raises an error if its package is not installed
    except (ValueError, RuntimeError, ImportError, AssertionError) as error:
        raise ConfigError(
            f"training.report_to: {training.report_to} cannot be reported to: {one_line(error)}"
        ) from None
    try:
        return MultiAgentPPOConfig.from_config(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"training: {one_line(error)}") from None


def _check_bf16(training: TrainingOptions) -> None:
    """Check that the device computes in bfloat16 where mixed precision is asked for."""
    # transformers refuses it too, but names a setting of its own and not the device
    if not training.bf16 or training.use_cpu or training_args.is_torch_bf16_gpu_available():
        return
    kind = accelerator()
    if kind is None:
        raise ConfigError(
            "training.bf16: no accelerator was found; set training.bf16: false, or training.use_cpu: true to compute "
            "in bfloat16 on the CPU"
        )
    raise ConfigError(f"training.bf16: this {kind.type} device does not compute in bfloat16; set training.bf16: false")


def _reports(names: list[str]) -> list[str] | str:
    """Return ``report_to`` as ``TrainingArguments`` reads it: "all" and "none" are texts and not lists."""
    return names[0] if names in (["all"], ["none"]) else names


def _check_schedule(training: TrainingOptions) -> None:
    """Check that the schedule of the learning rate exists, has the options that it needs, and can step."""
    name, options = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    names = [kind.value for kind in SchedulerType]
    if name not in names:
        raise ConfigError(f"training.lr_scheduler_type: {unknown(name, names)}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        maker: Callable[..., Any] = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]  # type: ignore[assignment]  # of functions
        inspect.signature(maker).bind_partial(**options)
        schedule = get_scheduler(name, optimizer, 0, 1, options)
        optimizer.step()
        schedule.step()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"training.lr_scheduler_type: {name} cannot be used with lr_scheduler_kwargs {options}: {one_line(error)}"
        ) from None


def check_run(config: Config) -> list[str]:
    """Check everything that can be checked without loading a model. Return the findings as lines of text.

    Raises:
        ConfigError: the run cannot start.
    """
    run = ResolvedRun(config)
    training_arguments(config)
    placed = check_cluster(run)
    _check_writing(Path(config.output_dir))
    task, held_out = run.task, run.held_out
    tokenizers = load_tokenizers(config)
    _check_placement(config)
    refuse(fault for part in (choice.check, model_checks.check) for fault in part(run))
    task_warnings = check_own_task(run)
    check_reward_functions(run)
    refuse(model_checks.check_alphabets(run))
    for part in task.parts.values() if isinstance(task, Mixture) else [task]:
        run.protocol.check_example(part[0])
    world, tools, tool_lines = check_tools(run, tokenizers)
    rehearsal = Rehearsal(run, world)
    check_any_agent(rehearsal)
    check_taught(run, world)
    check_taught_calls(run, tools)
    measured = Measured(run, tokenizers, world, tools)
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
        str(threads_of(config)),
        *placed,
        *_run_lines(config, dialogues, f", if a dialogue takes {len(steps)} steps" if longer > dialogues else "", task),
        *tool_lines,
        *credit_lines(config.reward, run.protocol, run.learners, measured.dialogues),
        *warnings,
        *task_warnings,
        *refuse(label_warnings(run)),
        *refuse(findings(rehearsal)),
        *(() if config.loop.stages else _check_ppo(rehearsal)),
        *_fewer_questions(config, held_out),
    ]


def _check_ppo(rehearsal: Rehearsal) -> list[str]:
    """Check what PPO reads and a loop does not: its groups, its batch, and its options."""
    run = rehearsal.run
    return [
        *narrow_sampling(run),
        *_small_data(run.config, run.task),
        *refuse(lonely_groups(rehearsal)),
        *refuse(method_warnings(run)),
    ]


def _run_lines(config: Config, dialogues: int, condition: str, task: Task) -> list[str]:
    """Return how much is played: updates, questions, and the dialogues of a question, on a ``condition`` or always."""
    if config.loop.stages:
        return check_loop(config, dialogues, condition, len(task))
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


def _check_writing(folder: Path) -> None:
    """Check that the run's folder can be made and written to, by making an empty folder there and removing it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(prefix=".maporl-check-", dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir: {str(folder)!r} cannot be written: nothing can be made in {str(there)!r} ({error.strerror}); "
            "give another output_dir"
        ) from None


def _check_placement(config: Config) -> None:
    """Check that there are enough devices for every base model if ``placement`` is split."""
    if config.training.placement == "shared":
        return
    try:
        split(list(base_owners(config).values()), config.training.use_cpu)
    except ValueError as error:
        raise ConfigError(f"training.{error}") from None


def _describe(agent: AgentSection) -> str:
    if not agent.weights:
        return agent.engine if agent.api is None else f"{agent.api.model} by API"
    what = f"tiny {agent.tiny.architecture}" if agent.tiny else str(agent.model)
    here = agent.vllm is not None and agent.vllm.colocate is not None
    engine = (
        "" if agent.engine == AgentSection.engine else f", engine {agent.engine}{' in this process' if here else ''}"
    )
    return what + (f" + LoRA r={agent.lora.r}" if agent.lora else "") + ("" if agent.trainable else ", frozen") + engine
