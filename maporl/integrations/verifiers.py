"""Tasksets of the library verifiers (Prime Intellect) as tasks, scored by their own rewards. Imports no torch.

Such a taskset yields tasks with a prompt and with ``@reward`` methods. Its own environments call models themselves, so
agents play here by a protocol of maporl, and only the tasks and their rewards are taken.
"""

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import Any, Literal

from maporl.config.imports import look_up
from maporl.errors import one_line
from maporl.tasks.base import Task, TaskError
from maporl.types import Example, Grade, Message
from trl_ext.ppo.options import Positive, ProperShare, option

INSTALL = "pip install verifiers"
"""It needs exactly one version of the MCP SDK, so maporl names no extra for it."""


@dataclass(frozen=True)
class Verifiers(Task):
    """The tasks of a ``Taskset`` of verifiers 0.4 or later. The reward source ``verifiers`` is the sum of their
    weighted rewards.

    Rewards that need a runtime are left out. Tasks that need a container or bring tool servers are refused.

    Raises:
        ValueError: ``limit`` is below 1, or ``held_out`` is not between 0 and 1.
    """

    use: str = option(help="The class, as module:Taskset.")
    config: dict[str, Any] = option({}, "The values of its configuration.")
    limit: Positive | None = option(None, "Take the first tasks only, so many.")
    held_out: ProperShare = option(0.1, "The share of the tasks that is the evaluation split.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    labelled = False

    @cached_property
    def _tasks(self) -> list[Any]:
        if find_spec("verifiers") is None:
            raise TaskError(f"task verifiers: the package verifiers is not installed; install it with: {INSTALL}")
        taskset = _taskset(self.use, self.config)
        if getattr(taskset, "INFINITE", False) and self.limit is None:
            raise TaskError(f"task.use: {self.use} yields tasks without end; set task.limit")
        tasks = list(islice(taskset, self.limit))
        for task in tasks[:1]:
            _must_be_answerable(task, taskset, self.use)
        numbers = list(range(len(tasks)))
        random.Random(self.seed).shuffle(numbers)
        held_out = set(numbers[: max(1, round(len(tasks) * self.held_out))])
        return [task for number, task in enumerate(tasks) if (number in held_out) == (self.split == "eval")]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Example:
        number = range(len(self))[index]
        data = self._tasks[number].data
        messages = _messages(data)
        return Example(data.id or data.name or f"task {data.idx}", messages[-1]["content"], "", {"task": number})

    def before_question(self, example: Example) -> list[Message]:
        """Return the system prompt and the messages of the prompt before its last one."""
        return _messages(self._tasks[example.meta["task"]].data)[:-1]

    def grade(self, example: Example, text: str) -> Grade:
        """Return that the answer cannot be graded: its rewards say what it is worth."""
        return Grade(None, None, "a taskset of verifiers has rewards and no labels")

    def columns(self, example: Example) -> dict[str, Any]:
        """Return the fields of the task's data, for reward functions."""
        return self._tasks[example.meta["task"]].data.model_dump(exclude={"prompt"})

    def left_out(self) -> list[str]:
        """Return the names of the rewards that need a runtime, which are left out."""
        return [hook.__name__ for hook in self._tasks[0].hooks("reward") if _needs_runtime(hook)]

    def remark(self) -> str | None:
        """Say which rewards are left out."""
        names = self.left_out()
        return f"rewards of {self.use} that need a runtime are left out: {', '.join(names)}" if names else None

    async def rewards(self, example: Example, said: Sequence[Message]) -> dict[str, float]:
        """Return the weighted rewards of a conversation by name. ``said`` are its messages after the prompt.

        Raises:
            Exception: what the task's rewards raise.
        """
        from verifiers.v1.configs.agent import WireAgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        task = self._tasks[example.meta["task"]]
        messages = [*_messages(task.data), *said]
        prompt = len(messages) - len(said)
        nodes = [
            MessageNode(
                parent=number - 1 if number else None,
                message=_message(message),
                sampled=number >= prompt and message["role"] == "assistant",
            )
            for number, message in enumerate(messages)
        ]
        what = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace: Any = Trace(
            task=what, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes, is_completed=True, ok=True
        )
        await task.score(trace)
        return {name: reward.value for name, reward in trace.rewards.items() if reward is not None}


def _taskset(use: str, values: dict[str, Any]) -> Any:
    """Build the taskset that ``use`` names."""
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.taskset import Taskset
    from verifiers.v1.utils.generic import concrete_type

    kind: Any = look_up(use, {}, "task.use", Taskset)
    config = concrete_type(kind, TasksetConfig) or TasksetConfig
    try:
        return kind(config(**values))
    except ValueError as error:
        raise TaskError(f"task.config: {use} does not take {values!r:.200}: {one_line(error)}") from error


def _must_be_answerable(task: Any, taskset: Any, use: str) -> None:
    """Check that agents can answer a task without what only verifiers' own environments give."""
    if task.NEEDS_CONTAINER:
        raise TaskError(f"task.use: {use}: its tasks need a container; run them by verifiers itself")
    if task.toolsets(task.config) or taskset.toolsets(taskset.config):
        raise TaskError(
            f"task.use: {use}: its tasks bring tool servers, which only verifiers' own environments start; give agents "
            "the server by the MCP adapter, and a taskset without it"
        )
    if task.data.prompt is None:
        raise TaskError(f"task.use: {use}: its tasks have no prompt, because a user opens the conversation")


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(data: Any) -> list[Message]:
    """Return the system prompt and the prompt as messages of texts."""
    from verifiers.v1.types import content_text

    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": m.role, "content": content_text(m.content)} for m in data.prompt)]


def _message(message: Message) -> Any:
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds = {"assistant": AssistantMessage, "system": SystemMessage}
    return kinds.get(message["role"], UserMessage)(content=message["content"])
