"""The run folder's records: one line each, and cut back to a checkpoint without a change to what stays."""

import json

import pytest
import yaml

from maporl.run import ResolvedRun
from maporl.storage.run_folder import RunExists, RunFolder
from maporl.types import Dialogue, Example, Stop, Utterance, from_json, from_record, to_json, to_record
from trl_ext.files.jsonl import DamagedRecord


def test_a_dialogue_is_written_once_and_reads_back_equal(tmp_path):
    utterance = Utterance(0, "ann", "ann", 0, 0, [], "été \ud800", stop=Stop.LENGTH, parents=(), tags={"seed": 3})
    dialogue = Dialogue(Example("q", "1+1=", "2"), [utterance], {"ann": 1.0}, prompt=3, rollout=1)
    folder = RunFolder(tmp_path / "run")
    folder.add_dialogues(7, [dialogue])
    assert folder.dialogues.read_text() == json.dumps({"step": 7, **to_record(dialogue)}) + "\n"
    [record] = folder.read_dialogues()
    assert record["step"] == 7 and from_record(record) == dialogue
    line = to_json(dialogue)
    assert from_json(line) == dialogue and "été \\ud800" in line and line.encode()


def test_a_run_is_set_back_without_a_change_to_the_lines_that_stay(tmp_path):
    folder = RunFolder(tmp_path)
    lines = ['{"step":1,  "loss": 1.50}', '{"step": 2, "text": "é"}', '{"step": 3}']
    folder.metrics.write_text(f"{lines[0]}\n\n{lines[1]}\n{lines[2]}\n" + '{"step": 4, "cut')
    folder.rewind(2)
    assert folder.metrics.read_text() == f"{lines[0]}\n{lines[1]}\n" and not folder.dialogues.exists()
    folder.metrics.write_text(lines[0])  # whole, but its end was not written
    folder.rewind(2)
    folder.add_metrics(2, {"loss": 1.0})
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]


def test_another_runs_records_and_damage_are_refused(tmp_path):
    RunFolder(tmp_path).add_metrics(1, {})
    with pytest.raises(RunExists, match="holds another run; --resume goes on with it"):
        RunFolder(tmp_path).add_metrics(1, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(DamagedRecord, match="line 1 is damaged"):
        RunFolder(tmp_path).rewind(1)


def test_a_run_whose_configuration_has_fewer_keys_than_today_goes_on_and_one_with_another_value_does_not(tmp_path):
    from maporl.runs.train import train
    from maporl.validation.load import from_dict
    from trl_ext.files.manifest import CheckpointError

    def config(**changes):
        tiny = {"hidden_size": 16, "layers": 1, "heads": 2}
        return from_dict({
            "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum", "largest": 9}, "agents": {"ann": {"tiny": tiny}},
            "protocol": {"name": "debate", "turns": 1}, "updates": 1, "ppo": {"response_length": 2},
            "training": {"use_cpu": True}, "evaluation": {"questions": 0}, **changes,
        })  # fmt: skip

    train(config(), resume=False, quiet=True)
    file = tmp_path / "run" / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "engine_options" not in line))
    assert len(file.read_text()) < sum(map(len, lines))
    train(config(), resume=True, quiet=True)
    with pytest.raises(CheckpointError, match=r"started with another configuration \(seed was 0 and is 1\)"):
        train(config(seed=1), resume=True, quiet=True)


def test_a_run_goes_on_with_other_processes(tmp_path):
    """Where it trains may change, and its configuration then says so."""
    from maporl.runs.claim import claim
    from maporl.validation.load import from_dict

    def config(**cluster):
        agents = {"ann": {"tiny": {}}, "bob": {"tiny": {}}}
        return from_dict(
            {"output_dir": str(tmp_path), "task": {"name": "toy_sum"}, "agents": agents, "cluster": cluster}
        )

    claim(tmp_path, ResolvedRun(config(backend="ray")), resume=False)
    turns = {"policies": ["ann", "bob"], "sharing": "turns"}
    for other in (config(backend="ray", groups={"both": turns}), config()):
        claim(tmp_path, ResolvedRun(other), resume=True)
        assert from_dict(yaml.safe_load((tmp_path / "config.yaml").read_text())) == other
