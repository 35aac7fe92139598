"""Recorded log-probabilities, values and advantages of tokens are those of training."""

import json

import pytest

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from trl_ext.process import distributed


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 2]), (1, [0, 1]), (2, [])])
def test_a_process_traces_only_what_is_recorded_of_it(monkeypatch, rank, expected):
    """The first five dialogues of all processes are recorded, of which the first has three."""
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [3, 4, 4])
    assert distributed.share_of_first(list(range(4 if rank else 3)), 5) == expected


@pytest.mark.parametrize("critic", ["head", "none"])
def test_recorded_dialogues_have_the_numbers_of_their_token_rows(tiny, tmp_path, critic):
    agents = [
        Agent(name, *tiny(architecture, alphabet="0123456789+=;"))
        for name, architecture in (("ann", "llama"), ("bob", "qwen3"))
    ]
    args = MultiAgentPPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, total_episodes=8, response_length=5, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", dialogues_logged=3, critic=critic,
    )  # fmt: skip
    debate = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")
    odd = {"label": lambda dialogues, task: [[float(sum(u.response_ids) % 3) for u in d.utterances] for d in dialogues]}
    trainer = MultiAgentPPOTrainer(args, Team(agents), Arithmetic(largest=9), debate, sources=odd)
    kept = {}
    advantage = trainer.advantage

    def look(batch):
        advantage(batch)
        kept.update(answers=batch.dialogues, rows=batch.token_batches)
        return batch

    trainer.advantage = look
    trainer.train()
    for number, dialogue in enumerate(kept["answers"]):
        for u in dialogue.utterances:
            if number >= 3:
                assert u.trace is None
                continue
            rows = kept["rows"][u.policy]
            [row] = [
                i
                for i in range(len(rows))
                if rows.labels[i].endswith(f"turn {u.turn + 1}, dialogue {dialogue.example.id}.0")
            ]
            mask = rows.sampled_mask[row]
            assert u.trace.logprobs == pytest.approx(rows.old_logprobs[row][mask].tolist(), abs=6e-5)
            assert u.trace.advantages == pytest.approx(rows.advantages[row][mask].tolist(), abs=6e-5)
            assert any(value != 0 for value in u.trace.advantages)
            if critic == "none":
                assert u.trace.values is None
            else:
                assert u.trace.values == pytest.approx(rows.values[row][mask].tolist(), abs=6e-5)
            tokenizer = agents[0 if u.agent == "ann" else 1].tokenizer
            assert "".join(u.trace.pieces) == tokenizer.decode(u.response_ids)
            assert len(u.trace.pieces) == len(u.response_ids)
            same = [v for d in kept["answers"] for v in d.utterances if (v.agent, v.turn) == (u.agent, u.turn)]
            credit = sum(v.rewards["credit"] for v in same) / len(same)
            expected = {
                "by": "scale",
                "name": "std",
                "key": {"agent": u.agent, "turn": u.turn},
                "utterances": 8,
                "questions": 8,
            }
            assert u.trace.compared == expected | {"credit": pytest.approx(credit, abs=1e-4)}
    written = [json.loads(line) for line in (tmp_path / "dialogues.jsonl").read_text().splitlines()]
    assert len(written) == 3
    assert [u["trace"]["logprobs"] for u in written[0]["utterances"]] == [
        u.trace.logprobs for u in kept["answers"][0].utterances
    ]
