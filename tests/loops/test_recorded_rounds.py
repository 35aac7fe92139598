"""The first round of a loop may be a record: others have said it, and the team is trained on it."""

import json

import pytest
from tiny_runs import config_of

from maporl.errors import ConfigError
from maporl.loops.pairs import Siblings
from maporl.loops.plan import loop_lines, stages_of
from maporl.loops.recorded import round_of_record
from maporl.loops.section import LoopSection
from maporl.loops.singles import BestOf, Signs
from maporl.rollout.episode import SpeakerSpec
from maporl.runs.train import train
from maporl.team.team import Team
from maporl.types import Dialogue, Example, Stop, Utterance, to_record

ANSWERS = {"1+2": ("3", "4"), "2+2": ("4", "5"), "2+3": ("5", "5")}
"""What an agent behind an API said twice to each question. The last one is right twice."""


def record(folder, twice=False):
    lines = []
    for step, (question, answers) in enumerate(ANSWERS.items(), 1):
        for rollout, answer in enumerate(answers):
            right = str(sum(map(int, question.split("+"))))
            draft = Utterance(0, "ann", "ann", 0, 0, [asks(question)], f"{question}=", trainable=False, answers=False)
            last = Utterance(
                1, "bob", "bob", 0, 1, [asks(f"{question}=;")], answer, parents=(0,), trainable=False,
                rewards={"label": float(answer == right), "score": 9.0, "credit": 9.0},
                stop=Stop.EOS if rollout == 0 else Stop.LENGTH,
            )  # fmt: skip
            for u in (draft, last):
                u.fresh, u.tags = True, {"program": True}
            example = Example(question, f"{question}=", right)
            lines.append({"step": step, **to_record(Dialogue(example, [draft, last], prompt=step, rollout=rollout))})
    file = folder / "dialogues.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines * (1 + twice)))
    return file


def talk(question, base_url):
    raise AssertionError("nothing is sampled")


def asks(text):
    return {"role": "user", "content": text}


def looped(folder, file, *stages, rounds=1, **loop):
    stages = [{"learning_rate": 1e-3, "batch_size": 4, **stage} for stage in stages]
    sections = {
        "protocol": {"name": "program", "run": "test_recorded_rounds:talk"},
        "loop": {"dialogues": str(file), "stages": stages, "rounds": rounds, **loop},
        "reward": {"sources": {"label": 1.0}},
        "warm_start": {"steps": 0},
    }
    return config_of(folder, 1, sections)


def taken(tmp_path, twice=False):
    team = Team.from_config(looped(tmp_path, record(tmp_path, twice), {"train": "sft", "build": "best_of"}))
    specs = {name: SpeakerSpec("transformers", (name,)) for name in ("ann", "bob")}
    return team, round_of_record(tmp_path / "dialogues.jsonl", team, specs)


def test_what_others_said_has_the_tokens_of_the_team_and_no_scores_of_the_record(tmp_path):
    team, dialogues = taken(tmp_path)
    tokenizer = team.policies["bob"].tokenizer
    first, cut = dialogues[0].utterances, dialogues[1].utterances
    assert tokenizer.decode(first[1].prompt_ids) == "1+2=;"
    assert first[1].response_ids == [*tokenizer.encode("3", add_special_tokens=False), tokenizer.eos_token_id]
    assert cut[1].response_ids == tokenizer.encode("4", add_special_tokens=False), "what was cut off has no end"
    assert all(u.trainable and u.logprobs is None for u in (*first, *cut))
    assert [u.rewards for u in first] == [{}, {"label": 1.0}]
    assert [(d.prompt, d.rollout) for d in dialogues] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_record_behind_another_is_of_other_dialogues(tmp_path):
    _, dialogues = taken(tmp_path, twice=True)
    assert len({(d.prompt, d.rollout) for d in dialogues}) == 12 and max(d.prompt for d in dialogues) == 5


def test_builders_read_a_record_as_what_was_sampled(tmp_path):
    _, dialogues = taken(tmp_path)
    for dialogue in dialogues:
        for u in dialogue.utterances:
            u.rewards["credit"] = dialogue.utterances[1].rewards["label"]
    assert [(row.agent, row.question, row.good) for row in Signs()(dialogues) if row.agent == "bob"] == [
        ("bob", "1+2", True), ("bob", "1+2", False), ("bob", "2+2", True), ("bob", "2+2", False),
        ("bob", "2+3", True), ("bob", "2+3", True),
    ]  # fmt: skip
    assert [row.place for row in BestOf(keep=1.0)(dialogues) if row.agent == "bob"] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    assert Siblings()(dialogues) == [], "ann said the same twice, and bob was asked after other words"


@pytest.mark.slow
def test_a_loop_learns_from_a_record_without_sampling(tmp_path):
    pytest.importorskip("trl")
    file = record(tmp_path)
    config = looped(tmp_path / "run", file, {"train": "sft", "build": "best_of"}, {"train": "kto", "build": "signs"})
    train(config, resume=False)
    [figures] = json.loads((tmp_path / "run" / "rounds.json").read_text())
    assert [stage["bob"]["rows"] for stage in figures["stages"]] == [2, 6]
    assert figures["stages"][1]["bob"]["good"] == 4 and figures["stages"][1]["ann"]["rows"] == 6
    sampled = [json.loads(line) for line in (tmp_path / "run/round-1/sample/dialogues.jsonl").read_text().splitlines()]
    assert [d["utterances"][1]["rewards"]["credit"] for d in sampled] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert [d["utterances"][0]["rewards"]["credit"] for d in sampled] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def test_what_a_loop_of_a_record_says_before_it_starts(tmp_path):
    file = record(tmp_path)
    more = looped(tmp_path / "run", file, {"train": "sft", "build": "best_of"}, rounds=3, questions=4)
    (line,) = loop_lines(more, 2, "", 9)[:1]
    assert line.startswith(
        f"loop: the dialogues of {file}, then sft on best_of, into {tmp_path}/run; after it 2 rounds"
    )
    with pytest.raises(ConfigError, match=r"loop.dialogues: .*none.jsonl: no such file; give a dialogues.jsonl that"):
        stages_of(looped(tmp_path, tmp_path / "none.jsonl", {"train": "sft", "build": "best_of"}))
    with pytest.raises(ValueError, match="dialogues: no stage is trained on them"):
        LoopSection(dialogues=str(file))
