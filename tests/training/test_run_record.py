"""Recorded log-probabilities, values and advantages of tokens are those of training."""

import json

import pytest
from tiny_runs import config_of

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from maporl.loops.section import SFTStage
from maporl.loops.stages import trainer_options
from maporl.report.read import read_run
from maporl.runs.train import train
from maporl.storage.run_folder import RunFolder
from maporl.types import from_record
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
        disable_tqdm=True, save_strategy="no", dialogues_logged=3, critic=critic, learning_rate=1e-3,
        value_learning_rate=2e-3,
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
    metrics = trainer.train()
    rates = {"lr": 1e-3, "ann/lr": 1e-3, "bob/lr": 1e-3}
    rates |= {"ann/critic_lr": 2e-3, "bob/critic_lr": 2e-3} if critic == "head" else {}
    assert {name: rate for name, rate in metrics.items() if name.split("/")[-1] in ("lr", "critic_lr")} == rates
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
            assert u.trace.advantage == pytest.approx(sum(u.trace.advantages) / len(u.trace.advantages), abs=6e-5)
            if critic == "none":
                assert u.trace.values is None
            else:
                assert u.trace.values == pytest.approx(rows.values[row][mask].tolist(), abs=6e-5)
            tokenizer = agents[0 if u.agent == "ann" else 1].tokenizer
            assert "".join(u.trace.pieces) == tokenizer.decode(u.response_ids)
            assert len(u.trace.pieces) == len(u.response_ids)
            same = [v for d in kept["answers"] for v in d.utterances if (v.agent, v.turn) == (u.agent, u.turn)]
            credit = sum(v.rewards["credit"] for v in same) / len(same)
            expected = {"by": "scale", "name": "std", "key": {"agent": u.agent, "turn": u.turn}}
            expected |= {"utterances": 8, "questions": 8, "credit": pytest.approx(credit, abs=1e-4)}
            assert u.trace.compared == expected
    written = [json.loads(line) for line in (tmp_path / "dialogues.jsonl").read_text().splitlines()]
    assert len(written) == 3
    assert [u["trace"]["logprobs"] for u in written[0]["utterances"]] == [
        u.trace.logprobs for u in kept["answers"][0].utterances
    ]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A run of 3 updates of 4 questions with 3 dialogues each, which was resumed after the second."""
    folder = tmp_path_factory.mktemp("grouped") / "run"
    group = {
        "branching": {"group": 3},
        "advantage": {"returns": "utterance", "baseline": "mean", "scale": "none", "key": ["prompt", "agent", "turn"]},
        "dialogues_logged": 12,
    }
    options = {
        "per_device_train_batch_size": 4, "report_to": ["tensorboard"], "lr_scheduler_type": "constant",
    }  # fmt: skip
    for updates in (2, 3):
        train(config_of(folder, updates, group, **options), resume=updates == 3, quiet=True)
    return folder


def test_services_call_a_run_after_its_folder_and_not_at_random(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_NAME", raising=False)
    config = config_of(tmp_path / "debate/seed-3", 2, {}, per_device_train_batch_size=4)
    assert MultiAgentPPOConfig.from_config(config).run_name == "debate-seed-3"
    assert (
        trainer_options(config, SFTStage(train="sft", build="threshold"), None, tmp_path, True)["run_name"]
        == "debate-seed-3"
    )
    monkeypatch.setenv("WANDB_NAME", "mine")
    assert MultiAgentPPOConfig.from_config(config).run_name == "mine"


def test_the_card_counts_the_dialogues_that_were_played(grouped):
    assert "- updates: 3, dialogues: 36\n" in (grouped / "final/ann/README.md").read_text()
    records = RunFolder(grouped).read_metrics()
    counted = [(r["step"], r["episode"], r["audit/run/the run/dialogues"]) for r in records]
    assert counted == [(1, 4, 12), (2, 8, 12), (3, 12, 12)]


def test_turns_of_records_count_from_1_and_an_utterance_has_one_advantage(grouped):
    records = RunFolder(grouped).read_dialogues()
    assert {(u["agent"], u["turn"]) for r in records for u in r["utterances"]} == {
        ("ann", 1), ("bob", 1), ("ann", 2), ("bob", 2),
    }  # fmt: skip
    traces = [u["trace"] for r in records for u in r["utterances"] if u["trace"] is not None]
    assert {type(trace["advantage"]) for trace in traces} == {float}
    assert all(set(trace["advantages"]) == {trace["advantage"]} for trace in traces)
    old = json.loads(json.dumps(records[0]))
    del old["first_turn"]
    for u in old["utterances"]:
        key = u["trace"]["compared"]["key"]
        assert key["turn"] == u["turn"]
        u["turn"] = key["turn"] = u["turn"] - 1
    assert from_record(old) == from_record(records[0])
    shown = read_run(grouped).dialogues[0].dialogue
    assert [[u.turn for u in d.utterances] for d in (from_record(old), shown)] == [[0, 0, 1, 1]] * 2  # in Python from 0


def test_services_get_the_parts_of_the_run_and_names_as_the_page_of_metrics_says(grouped):
    scalars, texts = set(), []
    for file in sorted(grouped.rglob("events.out.*")):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(file)).Reload()
        scalars |= set(events.Tags()["scalars"])
        texts += [event.tensor_proto.string_val[0].decode() for event in events.Tensors("args/text_summary")]
    assert {"train/reward/credit", "train/accuracy/turn_1", "train/ann/lr"} <= scalars
    told = json.loads(texts[-1])
    assert told["task"]["name"] == "toy_sum" and told["protocol"]["turns"] == 2
    assert list(told["agents"]) == ["ann", "bob"] and told["agents"]["ann"]["tiny"]["hidden_size"] == 32
    assert told["branching"]["group"] == 3 and told["output_dir"] == str(grouped) and told["learning_rate"] == 1e-2
    assert told["reward"]["sources"] == {"label": 1.0} and told["advantage"]["baseline"] == "mean"
