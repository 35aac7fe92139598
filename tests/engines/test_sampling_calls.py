"""The sampling of agents that call tools: a turn keeps its sampling, and the stop strings of the call format stay."""

import pytest
import torch
from user_tools import AGENT, ALPHABET, MODULE, written

from maporl.runs.build import build_trainer
from maporl.types import Stop, TurnEnd
from maporl.validation.load import load
from trl_ext.sampling.own_weights import OwnWeights

CALL = '<call>{"name": "double", "arguments": {"n": 2}}</call>'
OWN = {"stop": ["!"], "max_tokens": [60, 3], "temperature": [0.5, 1.5]}
TINY = AGENT["tiny"] | {"alphabet": ALPHABET + '{}"!'}


@pytest.fixture
def trainer(tmp_path):
    (tmp_path / "doubling.py").write_text(MODULE)  # a process imports a module of one name only once
    agent = AGENT | {"tiny": TINY, "tools": ["double"], "sampling": OWN}
    config = written(
        tmp_path,
        agents={"ann": agent},
        tools={"double": {"use": "doubling:double"}},
        environments={},
        pythonpath=[str(tmp_path)],
        reward={"sources": {"label": 1.0}},
        protocol={"name": "debate", "turns": 2, "opening": "{question}", "alone": ";"},
    )
    return build_trainer(load(config), quiet=True)


def says(monkeypatch, model, ids):
    """Let ``model`` say the token ids of one completion after the other, whatever it reads."""
    place = {"completion": -1, "token": 0}
    kept = type(model).forward

    def forward(self, input_ids=None, **options):
        output = kept(self, input_ids=input_ids, **options)
        if input_ids.shape[1] > 1:  # a prompt, or what is new of it
            place.update(completion=place["completion"] + 1, token=0)
        output.logits = torch.full_like(output.logits, -30.0)
        output.logits[:, -1, ids[place["completion"]][place["token"]]] = 30.0
        place["token"] += 1
        return output

    monkeypatch.setattr(type(model), "forward", forward)


def drawn(monkeypatch):
    """The list that receives how each answer is drawn."""
    seen, submit = [], OwnWeights.submit

    def kept(self, requests):
        seen.extend(request.draw for request in requests)
        return submit(self, requests)

    monkeypatch.setattr(OwnWeights, "submit", kept)
    return seen


def test_a_call_ends_a_completion_and_the_segments_of_a_turn_are_sampled_alike(trainer, monkeypatch):
    policy = trainer.team.policies["ann"]
    lines = [CALL + "abc", "4!77", "12345"]
    says(monkeypatch, policy.model, [policy.tokenizer.encode(line, add_special_tokens=False) for line in lines])
    seen = drawn(monkeypatch)
    specs = trainer.player.specs(learning=frozenset({"ann"}), training=True)
    trainer.player.inform_engines()
    (dialogue,) = trainer.player.driver(trainer.task, trainer.args.decoding, specs=specs).play([trainer.task[0]])
    call, answer, later = dialogue.utterances
    assert (call.text, call.stop, call.part, call.turn_end) == (CALL, Stop.STOP, 0, None)
    assert call.calls[0].result.text == "4" and call.calls[0].result.error is None
    assert (answer.text, answer.stop, answer.part, answer.turn_end) == ("4!", Stop.STOP, 1, TurnEnd.ANSWER)
    assert (later.text, later.stop, later.turn) == ("123", Stop.LENGTH, 1)
    assert [(draw.temperature, draw.max_tokens, draw.stop) for draw in seen] == [
        (0.5, 60, ("!", "</call>")),
        (0.5, 60, ("!", "</call>")),
        (1.5, 3, ("!", "</call>")),
    ]
    assert [u.temperature for u in dialogue.utterances] == [0.5, 0.5, 1.5]


def test_of_agents_that_share_a_policy_only_the_one_that_may_call_ends_at_a_call(tmp_path, monkeypatch):
    shared = AGENT | {"policy": "both"}
    config = written(
        tmp_path,
        agents={"ann": shared | {"tools": ["calc"]}, "bob": shared},
        tools={"calc": {"use": "calculator"}},
        environments={},
        reward={"sources": {"label": 1.0}},
    )
    trainer = build_trainer(load(config), quiet=True)
    seen = drawn(monkeypatch)
    trainer.player.play([trainer.task[0]], trainer.task, trainer.args.decoding)
    assert [draw.stop for draw in seen[:2]] == [("</call>",), ()]
