"""What an update's dialogues show of tools: how often agents call, how calls and turns end. Imports no torch."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from maporl.environments.world import World
from maporl.types import Dialogue
from trl_ext.process import distributed

logger = logging.getLogger(__name__)


def mention_no_calls(agents: Collection[str], dialogues: Sequence[Dialogue], metrics: Mapping[str, float]) -> None:
    """Warn of ``agents`` with tools that spoke in an update and called none of them.

    ``metrics`` are those of :func:`tool_metrics`, over all processes.
    """
    spoke = {utterance.agent for dialogue in dialogues for utterance in dialogue.utterances}
    silent = [agent for agent in agents if agent in spoke and not metrics.get(f"calls/{agent}")]
    if silent:
        logger.warning(
            "agents with tools that called none of them in the first update: %s; perhaps the model does not know how: "
            "show it an example in agents.NAME.system, set call_format: json, teach it by warm_start.calls, or train "
            "it first with maporl sft",
            ", ".join(silent),
        )


def tool_metrics(dialogues: Sequence[Dialogue], world: World, callers: Collection[str]) -> dict[str, float]:
    """Return the metrics of calls and environments, over all processes. All processes call this together.

    ``callers`` are the agents with tools, which may be other agents. Without these and without tools and environments
    that a protocol uses nothing is returned.
    """
    if not world.tools and not world.environments and not callers:
        return {}
    sums: dict[str, float] = defaultdict(float)
    for name, amount in world.take_counts().items():
        sums[name] += amount
    for utterance in (u for dialogue in dialogues for u in dialogue.utterances):
        if utterance.turn_end is not None:
            sums[f"turns/end/{utterance.turn_end.value}"] += 1
        for call in utterance.calls:
            sums[f"calls/{utterance.agent}"] += 1
            if call.result is not None:
                sums["tools/seconds"] += call.result.seconds
                sums["tools/left_out"] += call.result.left_out
                if call.result.error is not None:
                    sums[f"calls_failed/{call.result.error}"] += 1
    together: dict[str, float] = defaultdict(float)
    for process_sums in distributed.all_gather(dict(sums)):
        for name, amount in process_sums.items():
            together[name] += amount
    return dict(together)
