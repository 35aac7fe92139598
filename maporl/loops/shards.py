"""What was sampled in the rounds of a loop, and the rows that a stage makes of it. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maporl.errors import RunError
from maporl.loops.builder import said
from maporl.loops.plan import Stage, trained_on
from maporl.loops.replay import drawn, redrawn, shares
from maporl.loops.rows import AnyRow, of_round
from maporl.loops.section import PolicyStage, RowsStage, StageSection
from maporl.types import Dialogue, from_json


def dialogues_of(sample: Path) -> list[Dialogue]:
    """Return what was sampled into a folder of the loop."""
    lines = (sample / "dialogues.jsonl").read_text(encoding="utf-8").split("\n")
    return [from_json(line) for line in lines if line]


def stage_rows(folder: Path, stage: Stage, number: int, position: int, seed: int) -> list[AnyRow]:
    """Return the rows of a stage, none for one without a builder: those of round ``number``, and by ``replay`` those of
    earlier rounds, the newest first.

    Args:
        folder: the folder of the loop.
        stage: the stage with its builder.
        number: the number of the round, from 1.
        position: the number of the stage, from 0.
        seed: decides with the numbers which rows of earlier rounds are drawn.

    Raises:
        RunError: no rows were made.
    """
    section, builder = stage
    if builder is None or not isinstance(section, RowsStage):
        return []
    parts = shares(section.replay, number)
    rounds = [
        of_round(builder(dialogues_of(folder / f"round-{number - age}/sample"), roles_of(section)), number - age)
        for age in range(len(parts))
    ]
    name = f"{seed}/{number}/{position}"
    if section.replay_size == "current":
        rows = redrawn(rounds, parts, name)
    else:
        shorter = [
            rows if parts[age] == 1 else drawn(rows, parts[age], f"{name}/{age}") for age, rows in enumerate(rounds)
        ]
        rows = [row for part in shorter for row in part]
    if not rows:
        sample = folder / f"round-{number}/sample"
        raise RunError(
            f"{place_of(section, number, position)}: {counts(dialogues_of(sample), section)}; no rows were made of "
            "them, so nothing can be trained. Sample more questions, or change the builder's options; what was "
            f"sampled is in {sample}"
        )
    return rows


def roles_of(section: StageSection) -> tuple[str, ...]:
    """Return the roles in which utterances are taken, none for all."""
    return section.roles if isinstance(section, PolicyStage) else ()


def place_of(section: StageSection, number: int, position: int) -> str:
    """Return how messages call a stage of a round."""
    return f"round {number}, stage {position + 1} ({trained_on(section)})"


def check_both_kinds(about: Mapping[str, Any], where: str, policy: str) -> None:
    """Check that a policy's rows for KTO are not all of one kind. ``about`` is what the manifest says of them.

    Raises:
        RunError: they are all good, or all bad.
    """
    if about.get("good") in (0, about["rows"]):
        raise RunError(
            f"{where}: {about['good']} of {about['rows']} answers of policy {policy!r} are good, and KTO learns from "
            "good and bad ones; sample more questions, or change the builder's threshold"
        )


def speakers_in(dialogues: Sequence[Dialogue], roles: Sequence[str]) -> set[str]:
    """Return the policies that spoke in ``roles``, or in any role if ``roles`` is empty."""
    said_by = [(u.policy, u.role or u.agent) for d in dialogues for u in d.utterances]
    return {policy for policy, role in said_by if not roles or role in roles}


def counts(dialogues: Sequence[Dialogue], section: StageSection) -> str:
    """Return how many utterances a stage can choose from, by role, with the range of their values."""
    values: dict[str, list[float]] = {}
    for row, _ in said(dialogues, roles_of(section)):
        values.setdefault(row.role, []).append(row.value)
    parts = [
        f"{role}: {len(numbers)} with values from {min(numbers):.3g} to {max(numbers):.3g}"
        for role, numbers in values.items()
    ]
    return f"{len(dialogues)} dialogues, utterances: {', '.join(parts) or 'none of these roles'}"
