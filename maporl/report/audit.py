"""What a run did, against what the parts of a team promise: the table of a team, and the audit of a run's folder.

:mod:`trl_ext.learning.audit` says how it works. The terminal, the page, the model card and ``maporl audit`` take what
they say of a run from here.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maporl.errors import RunError
from maporl.report.charts import finite
from maporl.report.files import is_there, unlike
from maporl.report.read import Run
from maporl.types import Dialogue, Stop, is_program
from trl_ext.learning.audit import (
    AUDIT,
    LEARNER,
    MOST,
    Audit,
    Built,
    Promise,
    audit,
    counted,
)

CAPTURED = 0.7
"""The share of one role in the gradients of a policy from which on the others hardly move it."""
FAR = 0.1
"""The distance in nats a token between the weights that answered and those that are trained, from which on answers
teach less. In tiny worlds, answers that were 0.3 away lost 39 points of accuracy, and nearer ones 7 and none
(docs/cluster.md)."""

TEAM: tuple[Promise, ...] = (
    *LEARNER,
    Promise("is trained", "learner", "idle", lambda n: n.rounds and not n.rows,
        lambda n: f"was trained on no row, in {n.rounds} rounds",
        "see what its stages build (loop.stages), or freeze its agents"),
    Promise("learns from near answers", "learner", "doubt", lambda n: n.far > MOST * n.due,
        lambda n: f"learned in {n.far} of {n.due} updates from answers of weights that were {FAR} nats a token away",
        "ppo.ratio_to: sampler, a lower learning rate or a smaller training.async_depth brings them nearer"),
    Promise("learns from all its roles", "learner", "doubt", lambda n: n.captured > MOST * n.by_role,
        lambda n: f"was moved by one of its roles for {CAPTURED:.0%} and more in {n.captured} of {n.by_role} updates",
        "training.balance: role weighs them equally, and maporl sharing compares a policy for each role"),
    Promise("asks who learns", "run", "void", lambda n: n.dialogues > n.failed and n.due and not n.asked,
        lambda n: f"asked none of the agents that learn, in {n.dialogues} dialogues" + (f": {n.why}" if n.why else ""),
        "let the protocol, or the program's client (base_url), ask them"),
    Promise("plays", "program", "void", lambda n: n.dialogues and n.failed == n.dialogues,
        lambda n: f"failed in all {n.dialogues} dialogues",
        "try it with maporl play, which shows its error"),
    Promise("is answered", "program", "doubt", lambda n: n.refused,
        lambda n: f"was refused {n.refused} requests in {n.dialogues} dialogues",
        "maporl check names what is refused, and protocol.ignore leaves it out"),
    Promise("plays", "program", "doubt", lambda n: n.failed,
        lambda n: f"failed in {n.share('failed', 'dialogues')} dialogues",
        "their errors are in dialogues.jsonl"),
    Promise("is answered", "agent", "void", lambda n: n.learns and n.asked and n.refused == n.asked,
        lambda n: f"was refused all of its {n.asked} requests" + (f": {n.why}" if n.why else ""),
        "see why in the tag refused of dialogues.jsonl, such as a prompt that does not fit the context"),
    Promise("is asked", "agent", "idle", lambda n: n.learns and n.updates and not n.asked,
        lambda n: f"is to learn and was asked nothing in {n.updates} updates",
        "let the protocol ask it, or set trainable: false"),
    Promise("is asked", "agent", "doubt", lambda n: n.updates and not n.asked,
        lambda n: f"plays and was asked nothing in {n.updates} updates",
        "leave it out, or let the protocol ask it"),
    Promise("is answered", "agent", "doubt", lambda n: n.refused,
        lambda n: f"was refused {n.share('refused', 'asked')} requests",
        "see why in the tag refused of dialogues.jsonl"),
    Promise("ends its answers", "agent", "doubt", lambda n: n.ends and n.cut > MOST * n.asked,
        lambda n: f"did not end {n.share('cut', 'asked')} answers within the longest length",
        "raise ppo.response_length or the max_tokens of its sampling, or fine it (reward.penalties.no_eos)"),
    Promise("is credited", "agent", "doubt", lambda n: n.uncredited,
        lambda n: f"learned nothing from {n.uncredited} of {n.uncredited + n.credited} utterances, which had no "
        "credit: nothing scored them, and they were shown to nobody who had a credit",
        "name their ids in Ask.parents of those who are shown them, or let a reward source, the protocol (pays) or a "
        "rule credit them"),
    Promise("can be right", "agent", "doubt", lambda n: n.learns and n.wrong and not n.right,
        lambda n: f"was right in none of {n.wrong} graded answers",
        "ask easier questions, or begin with a model that is right at times (maporl eval)"),
    Promise("can be wrong", "agent", "doubt", lambda n: n.learns and n.right and not n.wrong,
        lambda n: f"was right in all of {n.right} graded answers",
        "ask harder questions"),
    Promise("is measured on other questions", "task", "doubt", lambda n: n.overlap,
        lambda n: f"is measured on what it trains: {n.overlap}",
        "hold others out (task.eval_source or task.held_out, where the task has it)"),
    Promise("has labels", "task", "doubt", lambda n: n.unreadable,
        lambda n: f"has labels that nobody can read: {n.unreadable} of the {n.labels} that were tried",
        "correct or remove them; maporl check shows some"),
    Promise("has one label for a question", "task", "doubt", lambda n: n.conflicting,
        lambda n: f"asks {n.conflicting} questions again with another label",
        "correct or remove them"),
    Promise("is graded", "task", "doubt", lambda n: n.ungraded,
        lambda n: f"could not grade {n.ungraded} of {n.ungraded + n.graded} answers to questions with a label",
        "maporl check counts labels that nobody can read, with examples"),
    Promise("is used", "tool", "doubt", lambda n: n.updates and not n.calls,
        lambda n: f"was never called in {n.updates} updates",
        "teach the model to call it (warm_start.calls, maporl sft), show it an example in agents.NAME.system, choose "
        "another agents.NAME.call_format, or leave the tool out"),
    Promise("works", "tool", "doubt", lambda n: n.failed > MOST * n.calls,
        lambda n: f"failed in {n.share('failed', 'calls')} calls",
        "see their errors in the calls of dialogues.jsonl"),
)  # fmt: skip
"""What the parts of a team promise, in the order from the data to the weights."""


def dialogue_counts(dialogues: Iterable[Dialogue]) -> Counter:
    """Return what an update's dialogues count for the audit, besides rewards. Sums over processes are those of all."""
    counts: Counter = Counter()
    for dialogue in dialogues:
        program = is_program(dialogue)
        counts["run/the run/dialogues"] += 1 + len(dialogue.ablations)
        if program:
            failed, requests = bool(dialogue.outcome.get("failure")), dialogue.outcome.get("requests", 0)
            refused = requests - dialogue.outcome.get("answered", requests)
            counts.update({"program/the program/dialogues": 1, "program/the program/failed": failed, "program/the program/refused": refused})  # fmt: skip  # noqa: E501
            counts["run/the run/failed"] += failed
        for u in dialogue.utterances:
            agent, refusal = f"agent/{u.agent}", "refused" in u.tags
            names = [f"{agent}/asked", f"learner/{u.policy}/asked"]
            names += [f"{agent}/refused"] if refusal else [f"learner/{u.policy}/answered"]
            names += [f"{agent}/cut"] if u.stop == Stop.LENGTH else []
            grade = u.grade.correct if u.answers and u.grade is not None else None
            if grade is not None:
                names += [f"{agent}/{'right' if grade else 'wrong'}", "task/the task/graded"]
            elif u.answers and u.grade is not None and dialogue.asked(u).answer:
                names.append("task/the task/ungraded")
            for call in u.calls:
                used = [f"tool/{name}" for name in {call.name, call.place} - {None, ""}]
                names += [f"{name}/calls" for name in used]
                names += [f"{name}/failed" for name in used if call.result is not None and call.result.error]
            counts.update(names)
    return counts


def metric_counts(metrics: Mapping[str, float], learners: Iterable[str]) -> dict[str, float]:
    """Return what an update's metrics count for the audit: answers of older weights that are far away, and roles from
    which nearly all that moves a policy comes."""
    counts: dict[str, float] = {}
    for name in learners:
        old, gap = metrics.get(f"{name}/policy/staleness", 0.0), metrics.get(f"{name}/policy/engine_gap", 0.0)
        shares = [v for key, v in metrics.items() if key.startswith(f"{name}/role/") and key.endswith("/grad_share")]
        captured = bool(shares) and max(shares) > max(CAPTURED, 1.5 / len(shares))
        told = {"far": old > 0 and gap >= FAR, "by_role": bool(shares), "captured": captured}
        counts |= {f"learner/{name}/{count}": float(number) for count, number in told.items() if number}
    return counts


def read_audit(file: Path) -> Audit:
    """Return the audit in a ``file`` of a run's folder, as it was when the file was written.

    Raises:
        RunError: it is damaged.
    """
    with unlike(f"{file}: is damaged", "; without it, a run is audited by its records", RunError):
        return Audit.from_json(json.loads(file.read_text(encoding="utf-8")))


def audit_of(run: Run) -> Audit:
    """Return the audit of a run's folder, as far as the run came.

    A run that recorded no audit is audited by its metrics and dialogues; the note says what is not known then.

    Raises:
        RunError: the recorded audit is damaged, or no file.
    """
    updates, wanted = run.updates(), run.config.get("updates")
    file = run.folder / AUDIT
    ended = (
        ""
        if run.finished or not updates
        else f"after {updates[-1]['step']} of {wanted} updates; the run goes on, or was cut off"
    )
    if is_there(file):
        recorded = read_audit(file)
        built, counts, note = recorded.built, counted(run.metrics) or recorded.counts, ended
    else:
        built, counts = _of_records(run)
        known = "by the records of a run without an audit, which say nothing of masks and critics"
        note = "; ".join(filter(None, ["" if run.section("loop").get("stages") else known, ended]))
    return audit(built, counts, TEAM, note)


def audits_of(run: Run) -> dict[str, Audit]:
    """Return the audit of a run by its name, which is empty; of a loop, one of each round and one of all of them."""
    whole = audit_of(run)
    if not run.section("loop").get("stages"):
        return {"": whole}
    rounds = {f"round {r['step']}": audit(whole.built, counted([r]), TEAM) for r in run.updates()}
    return {**rounds, "all rounds": whole}


def _of_records(run: Run) -> tuple[Built, Mapping[str, float]]:
    """Return facts and counts of a run that recorded no audit: what its metrics and its dialogues say."""
    updates = run.updates()
    counts = counted(updates) or dialogue_counts(one.dialogue for one in run.dialogues if isinstance(one.when, int))
    learners: dict[str, dict[str, Any]] = {key.split("/")[1]: {} for key in counts if key.endswith("/rounds")}
    for key in {key for record in updates for key in record if key.endswith("/grad_norm")}:
        name = key.removesuffix("/grad_norm")
        norms = [norm for record in updates if (norm := finite(record.get(key))) is not None]
        equal = [share for r in updates if (share := finite(r.get(f"{name}/frac_reward_zero_std"))) is not None]
        learners[name] = {"groups": "groups, by the mean over updates,"}
        moved = sum(norm > 0 for norm in norms)
        told = {
            "due": len(norms),
            "moved": moved,
            "learned": moved,
            "compared": len(equal),
            "differ": len(equal) - sum(equal),
        }
        counts.update({f"learner/{name}/{count}": number for count, number in told.items()})
    agents = {key.split("/")[1] for key in counts if key.startswith("agent/")}
    return {
        "learner": learners,
        "agent": {name: {"ends": True} for name in sorted(agents)},
        "run": {"the run": {}},
    }, counts


def shown(done: Audit) -> dict[str, Any]:
    """Return an audit as the page shows it: a ``table`` of learners, and ``findings`` with their severity."""
    columns, rows = done.table()
    return {
        "note": done.note,
        "columns": columns,
        "rows": rows,
        "findings": [{"severity": severity, "text": text} for severity, text in done.told()],
    }
