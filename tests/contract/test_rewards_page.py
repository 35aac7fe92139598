"""Every number of docs/rewards.md is what the rule at the head of its column computes from the rest of its table.

A table is a dialogue, with one utterance in each row. A column whose head is code is the credit under that rule, or
under those options of the section ``reward``. The other columns say what was said and how it was scored.
"""

import re
from dataclasses import replace

import pytest
import yaml
from folders import ROOT, tables

from maporl.config.schema import RewardSection
from maporl.rewards.counterfactual import set_contributions
from maporl.rewards.credit import assign_credit
from maporl.rewards.rules import RULES
from maporl.types import Dialogue, Example, Grade, Stop, Utterance

PAGE = ROOT / "docs/rewards.md"
KNOWN = {"dialogue", "#", "agent", "turn", "role", "shown", "called by", "tokens", "token ids", "final answer", "end"}
KNOWN |= {"score", "verdict"}


def is_credit(head):
    return bool(re.fullmatch(r"`.+`", head))


def credit_columns():
    """The columns of the page that show credits: the table's number, its rows, and the column's head."""
    shown = [rows for rows in tables(PAGE) if "#" in rows[0]]
    return [(number, rows, head) for number, rows in enumerate(shown, 1) for head in rows[0] if is_credit(head)]


def utterance(row):
    """The utterance that a row of a table describes."""
    said = Utterance(
        int(row["#"]),
        row["agent"],
        row["agent"],
        int(row.get("turn", 1)) - 1,
        int(row["#"]),
        [],
        "",
        role=row.get("role") or None,
        parents=tuple(int(number) for number in row.get("shown", "").split(",") if number),
        caller=int(row["called by"]) if row.get("called by") else None,
        response_ids=[int(token) for token in row.get("token ids", "").split()]
        or list(range(int(row.get("tokens", 0)))),
        stop={"eos": Stop.EOS, "cut off": Stop.LENGTH}[row.get("end", "eos")],
        sample=row.get("shared as") or None,
    )
    answer = row.get("final answer", "right")
    said.grade = Grade(None if answer == "none" else answer, answer == "right", "the page says so")
    if row.get("verdict"):
        said.tags["verdict"] = {"good": 1, "bad": -1, "unreadable": None}[row["verdict"]]
    said.rewards = {head[8:-1]: float(text) for head, text in row.items() if head.startswith("reward `") and text}
    if row.get("score"):
        said.rewards["score"] = float(row["score"])
    said.answers = "score" in said.rewards
    return said


def credits(rows, head):
    """The credit of each row of a table under the rule or the options in ``head``; None where the table has no
    number."""
    for name in set(rows[0]) - KNOWN:
        assert is_credit(name) or name == "shared as" or re.fullmatch(r"reward `\w+`|without \w+", name), name
    said = [utterance(row) for row in rows]
    dialogues = {}
    for row, u in zip(rows, said, strict=True):
        number = int(row.get("dialogue", 1))
        dialogue = dialogues.setdefault(number, Dialogue(Example("e", "q", "a"), [], rollout=number))
        dialogue.utterances.append(u)
        for name in (name for name in row if name.startswith("without ") and row[name]):
            alone = replace(u, rewards={"score": float(row[name])})
            dialogue.ablations.append(Dialogue(dialogue.example, [alone], without=(name.removeprefix("without "),)))
    spec = yaml.safe_load(head.strip("`"))
    entry = {"rules": [spec]} if isinstance(spec, str) or next(iter(spec)) in RULES else spec
    agents = tuple(dict.fromkeys(u.agent for u in said))
    set_contributions(list(dialogues.values()))
    assign_credit(list(dialogues.values()), agents, RewardSection(**entry))
    return [u.rewards.get("credit") for u in said]


@pytest.mark.parametrize(
    ("number", "rows", "head"), [pytest.param(*t, id=f"table {t[0]}: {t[2]}") for t in credit_columns()]
)
def test_a_column_of_credits_is_what_its_rule_computes(number, rows, head):
    shown = [float(row[head]) if row[head] else None for row in rows]
    assert shown == pytest.approx(credits(rows, head), abs=6e-4)
    assert any(value is not None for value in shown)


def test_the_page_explains_every_rule_with_numbers():
    named = set()
    for _, _, head in credit_columns():
        spec = yaml.safe_load(head.strip("`"))
        named |= {spec} if isinstance(spec, str) else set(spec)
    headings = set(re.findall(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    missing = sorted(set(RULES) - (named & headings))
    assert not missing, (
        f"docs/rewards.md: explain {', '.join(missing)}, each below a heading '### `name`', with the table of a dialogue "
        "whose last column is headed by the rule and has its credits; copy the section of another rule"
    )
    assert {"horizon", "share", "bonus", "penalties"} <= named
