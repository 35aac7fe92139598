"""Resuming: from a damaged run, from an older checkpoint, beside another process, and with data that have changed."""

import json
import logging
import shutil
import signal
import time
from pathlib import Path

import processes
import pytest
import torch
from fast_cases import some
from notebook_runs import names
from one_policy import StopAfter
from tiny_runs import assert_same_end, config_of, end_of, start
from typer.testing import CliRunner

from maporl import Arithmetic
from maporl.cli.main import app
from maporl.errors import RunError
from maporl.report.read import read_run
from maporl.run import ResolvedRun
from maporl.runs import train as run
from maporl.runs.build import build_trainer
from maporl.runs.claim import claim, must_be_free
from maporl.storage.run_folder import RunExists, RunFolder
from maporl.tasks import TaskError, build_task
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.files import manifest
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.fingerprint import DATA, DataChanged, check_data, fingerprint
from trl_ext.files.jsonl import DamagedRecord
from trl_ext.files.lock import FolderInUse, RunLock
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.checkpoint import read_state

UPDATES = 4
EVALUATION = {"evaluation": {"questions": 6}}


def config(folder, **training):
    return config_of(folder, UPDATES, EVALUATION, save_total_limit=9, **training)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run.train(config(folder), resume=False, quiet=True)
    return folder


@pytest.fixture
def ended(calm, tmp_path):
    """A copy of the calm run, as its own command would see it."""
    folder = tmp_path / "run"
    shutil.copytree(calm, folder)
    set_home(folder, calm)
    return folder


def set_home(folder, was):
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace(str(was), str(folder)))


def damage(checkpoint):
    file = checkpoint / "policies/ann/model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def steps(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def same_end(one, other):
    assert_same_end(end_of(one, UPDATES), end_of(other, UPDATES))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_set_aside_each_time_it_is_needed(calm, ended, caplog):
    """Training went on from the older one and then ended, because a checkpoint of the damaged one's name existed."""
    config_here = config(ended)
    for number, name in enumerate(["checkpoint-4.damaged", "checkpoint-4.damaged-2"], 1):
        shutil.rmtree(ended / "final")  # as if the run had been killed before its end
        damage(ended / "checkpoint-4")
        run.train(config_here, resume=True, quiet=True)
        same_end(ended, calm)
        assert (ended / name).is_dir()
        assert [p.name for p in list_checkpoints(ended)] == [f"checkpoint-{n}" for n in (1, 2, 3, 4)]
        assert steps(ended / "metrics.jsonl.abandoned") == [4] * number, "nothing that was recorded is lost"
    assert "resumes after update 3; what came later was set aside: " in caplog.text


@pytest.mark.slow
def test_an_ended_run_goes_on_if_it_is_given_more_updates(calm, ended, capfd):
    rates = [record["lr"] for record in read_run(calm).updates()]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    words = ["train", str(ended / "config.yaml"), "--resume", "-q", "--updates"]
    refused = CliRunner().invoke(app, [*words, "3"])
    assert refused.exit_code == 1 and "updates was 4 and is 3" in refused.output, refused.output
    assert "in which updates may be more" in refused.output and names(ended) == names(calm)
    done = CliRunner().invoke(app, [*words, "5"])
    assert done.exit_code == 0, done.output
    assert "made longer, to 5 updates in place of 4" in done.output
    assert [record["step"] for record in read_run(ended).updates()] == [1, 2, 3, 4, 5]
    assert read_run(ended).updates()[-1]["lr"] == pytest.approx(0.01 / 5)
    assert (ended / "final").is_dir() and {"final.abandoned", "evaluation_after.json.abandoned"} <= set(names(ended))
    assert (ended / "evaluation_after.json").is_file() and "updates: 5" in (ended / "config.yaml").read_text()
    again = CliRunner().invoke(app, [*words, "5"])
    assert again.exit_code == 0 and "its run has ended; nothing is left to train" in again.output


def test_a_run_without_a_checkpoint_is_not_made_longer(ended):
    for folder in list_checkpoints(ended):
        shutil.rmtree(folder)
    before = names(ended)
    with pytest.raises(CheckpointError, match="cannot be made longer, because it has no checkpoint"):
        run.train(config_of(ended, UPDATES + 1, EVALUATION, save_total_limit=9), resume=True, quiet=True)
    assert names(ended) == before


@pytest.mark.parametrize("left", some(["nothing", "no manifest", "a file"], 1))
def test_any_remains_under_a_later_checkpoints_name_are_set_aside(calm, ended, left):
    shutil.rmtree(ended / "final")
    newest = ended / "checkpoint-4"
    if left == "no manifest":
        (newest / "MANIFEST.json").unlink()
    else:
        shutil.rmtree(newest)
        if left == "a file":
            newest.write_text("")
    run.train(config(ended), resume=True, quiet=True)
    same_end(ended, calm)
    assert (left != "nothing") == ("checkpoint-4.damaged" in names(ended))


def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_changes_nothing(ended):
    shutil.rmtree(ended / "final")
    for folder in list_checkpoints(ended):
        damage(folder)
    before = names(ended)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"every checkpoint is damaged \(4 found\); nothing was changed"):
            run.train(config(ended), resume=True, quiet=True)
    assert names(ended) == before


def resumed_trainer(folder, **options):
    return build_trainer(config(folder, **options), quiet=True)


def test_an_older_checkpoint_is_gone_on_from_and_the_abandoned_branch_stays_readable(calm, ended, caplog):
    recorded = {name: (ended / name).read_text() for name in ("metrics.jsonl", "dialogues.jsonl")}
    with caplog.at_level(logging.WARNING):
        trainer = resumed_trainer(ended)
        trainer.train(resume_from_checkpoint=str(ended / "checkpoint-2"))
    same_end(ended, calm)
    [line] = [r.getMessage() for r in caplog.records if "set aside" in r.getMessage()]
    moved = [
        "final.abandoned", "evaluation_after.json.abandoned", "evaluation_after.jsonl.abandoned",
        "checkpoint-4.abandoned", "checkpoint-3.abandoned", "metrics.jsonl.abandoned", "dialogues.jsonl.abandoned",
    ]  # fmt: skip
    assert line == f"{ended}: resumes after update 2; what came later was set aside: {', '.join(moved)}"
    assert set(moved) <= set(names(ended))
    for name, text in recorded.items():
        later = [text for text in text.splitlines() if json.loads(text)["step"] > 2]
        assert (ended / f"{name}.abandoned").read_text().splitlines() == later and later
    assert (ended / "final.abandoned/ann/model.safetensors").exists()
    read = read_run(ended)
    assert (
        [m["step"] for m in read.updates()] == [1, 2, 3, 4]
        and read.after == trainer.after is not None
        and read.before is not None
    )
    # a second time, and by the name in the run's folder
    resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-2")
    assert steps(ended / "metrics.jsonl.abandoned") == [3, 4, 3, 4]
    assert {"checkpoint-3.abandoned-2", "checkpoint-4.abandoned-2", "final.abandoned-2"} <= set(names(ended))
    assert [p.name for p in list_checkpoints(ended)] == [f"checkpoint-{n}" for n in (1, 2, 3, 4)]


def test_a_resume_hashes_each_file_once(ended, monkeypatch):
    """Hashing all files of a large checkpoint takes minutes."""
    hashed, digest = [], manifest.digest_of
    monkeypatch.setattr(manifest, "digest_of", lambda path: hashed.append(path) or digest(path))
    resumed_trainer(ended).train(resume_from_checkpoint=True)
    assert ended / "checkpoint-4/policies/ann/optimizer/optimizer.safetensors" in hashed and len(hashed) == len(
        set(hashed)
    )


def test_the_last_checkpoint_leaves_the_results_of_its_run_in_place(ended):
    before = names(ended)
    resumed_trainer(ended).train(resume_from_checkpoint=True)
    assert names(ended) == before


@pytest.mark.parametrize("wanted", some(["copy", "abandoned"], 0))
def test_a_checkpoint_from_elsewhere_does_not_go_on_in_a_folder_with_other_records(ended, tmp_path, wanted):
    """Its history is another one: the records before it are not in the folder."""
    other = tmp_path / "copy" / "checkpoint-2" if wanted == "copy" else ended / "checkpoint-2.abandoned"
    shutil.copytree(ended / "checkpoint-2", other)
    before = names(ended)
    with pytest.raises(RunExists, match="holds another run"):
        resumed_trainer(ended).train(resume_from_checkpoint=str(other))
    assert names(ended) == before
    fresh = tmp_path / "fresh"
    trainer = resumed_trainer(fresh)
    trainer.train(resume_from_checkpoint=str(other))
    assert steps(fresh / "metrics.jsonl") == [3, 4]


def test_what_cannot_be_resumed_is_refused_before_anything_is_renamed(ended):
    before = names(ended)
    for wanted, said in (("checkpoint-7", "no MANIFEST.json"), (str(ended / "initial"), "does not list state.json")):
        with pytest.raises(CheckpointError, match=said):
            resumed_trainer(ended).train(resume_from_checkpoint=wanted)
    damage(ended / "checkpoint-2")
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-2")
    for line in ("nonsense", "[1]", '{"loss": 1}', '{"step": "2"}'):
        file = ended / "dialogues.jsonl"
        whole = file.read_text()
        file.write_text(f"{line}\n{whole}")
        with pytest.raises(DamagedRecord, match="repair it, or remove"):
            resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-1")
        file.write_text(whole)
    other_seed = build_trainer(config_of(ended, UPDATES, {**EVALUATION, "seed": 4}), quiet=True)
    with pytest.raises(CheckpointError, match="was made with seed 3, this run has seed 4"):
        other_seed.train(resume_from_checkpoint="checkpoint-1")
    assert names(ended) == before


@pytest.mark.slow
def test_one_policys_trainer_sets_its_completions_aside_too(tiny, tmp_path):
    rows = [{"prompt": f"{i}+1="} for i in range(8)]

    def trained(stop_at=None, resume=None):
        model, tokenizer = tiny()
        args = PPOv2Config(
            output_dir=str(tmp_path), per_device_train_batch_size=8, total_episodes=32, response_length=4, report_to=[],
            save_strategy="steps", save_steps=1, disable_tqdm=True, use_cpu=True, num_sample_generations=4,
        )  # fmt: skip
        trainer = PPOv2Trainer(
            args, tokenizer, model, train_dataset=rows, eval_dataset=rows[:2],
            reward_funcs=lambda prompts, completions: [float(len(c)) for c in completions],
        )  # fmt: skip
        trainer.add_callback(StopAfter(stop_at))
        trainer.train(resume_from_checkpoint=resume)
        return {key: value.clone() for key, value in model.state_dict().items()}

    whole = trained()
    written = (tmp_path / "completions.jsonl").read_text()
    again = trained(resume="checkpoint-2")
    assert (tmp_path / "completions.jsonl").read_text() == written and steps(tmp_path / "completions.jsonl")[-1] == 4
    assert steps(tmp_path / "completions.jsonl.abandoned") == [3, 3, 4, 4]
    assert all(torch.equal(value, again[key]) for key, value in whole.items())
    rows.reverse()
    with pytest.raises(DataChanged, match="the data set 'train_dataset' has changed"):
        trained(resume=True)


# -- two processes --------------------------------------------------------------------------------------------------


def wait_for_updates(folder, count, process):
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_bytes().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder}: {count} updates did not come; {process.output()[1]}")


@pytest.mark.slow
def test_a_second_process_in_a_runs_folder_is_refused_and_who_only_looks_is_not(tmp_path):
    folder = tmp_path / "run"
    settings = config_of(folder, 2000, EVALUATION)
    process = start(tmp_path, settings)
    wait_for_updates(folder, 2, process)
    for options, status, said in (
        (["--resume"], 1, f"process {process.pid} on "),
        ([], 1, "exists and is not empty; nothing was overwritten"),
    ):
        other = processes.maporl("train", tmp_path / "config.yaml", "-q", *options)
        assert (other.returncode, said in other.stderr) == (status, True), other.stderr
        assert len(other.stderr.splitlines()) == 1
    with pytest.raises(FolderInUse, match=f"process {process.pid} on "):
        build_trainer(settings, quiet=True).train(resume_from_checkpoint=True)
    for looks in (["report", folder], ["eval", folder, "--checkpoint", folder / "initial"], ["watch", folder, "--tui"]):
        looked = processes.maporl(*looks)
        assert looked.returncode == 0, looked.stderr
    assert process.poll() is None, process.output()[1]
    process.kill()
    with RunLock(folder):
        pass
    counted = [record["step"] for record in RunFolder(folder).read_metrics()]
    assert counted == list(range(1, len(counted) + 1)), "no other process has written"
    again = start(tmp_path, settings, "--resume")  # the killed one left no lock
    wait_for_updates(folder, len(counted) + 1, again)
    again.send_signal(signal.SIGTERM)
    assert again.wait(120) == 143, again.output()[1]


@pytest.mark.slow
def test_two_that_start_at_once_leave_one_run(tmp_path):
    folder = tmp_path / "run"
    settings = config(folder)
    both = [start(tmp_path, settings) for _ in range(2)]
    ended = [process.wait(300) for process in both]
    assert sorted(ended) == [0, 1], [process.output()[1] for process in both]
    assert steps(folder / "metrics.jsonl") == [1, 2, 3, 4]


# -- data -----------------------------------------------------------------------------------------------------------


def data_config(folder, file, updates=2, **sections):
    sections = {
        "task": {"name": "gsm8k", "source": str(file), "eval_source": str(file), "instruction": "{question}"},
        **EVALUATION,
        **sections,
    }
    return config_of(folder, updates, {**sections, "warm_start": {"steps": 0}})


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(30)]
CHANGED = {
    "a letter": [*ROWS[:7], {"question": "7+2=", "answer": "9"}, *ROWS[8:]],
    "a label": [*ROWS[:7], {"question": "7+1=", "answer": "9"}, *ROWS[8:]],
    "another order": [*ROWS[1:], ROWS[0]],
    "fewer rows": ROWS[:-1],
    "more rows": [*ROWS, {"question": "1+9=", "answer": "10"}],
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run on a data file, without its end."""
    folder = tmp_path_factory.mktemp("data")
    written(folder / "data.jsonl", ROWS)
    run.train(data_config(folder / "run", folder / "data.jsonl"), resume=False, quiet=True)
    shutil.rmtree(folder / "run/final")
    return folder


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_whose_data_have_changed_is_not_gone_on_with_unawares(begun, name, monkeypatch):
    file, folder = begun / "data.jsonl", begun / "run"
    settings = data_config(folder, file)
    written(file, CHANGED[name])
    monkeypatch.setattr(run, "trainer_of", lambda *_, **__: pytest.fail("a model was loaded first"))
    before = names(folder)
    with pytest.raises(DataChanged, match=r"the data set 'gsm8k, train' has changed since the run began") as told:
        run.train(settings, resume=True, quiet=True)
    assert f"remove {folder / DATA}" in str(told.value) and names(folder) == before
    counts = f"30 rows then, {len(CHANGED[name])} now"
    assert (counts in str(told.value)) == (len(CHANGED[name]) != 30)
    written(file, ROWS)


def test_data_that_moved_are_the_same_and_changed_data_can_be_gone_on_with_on_purpose(begun, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "elsewhere.jsonl"
    shutil.copytree(begun / "run", folder)
    set_home(folder, begun / "run")
    written(file, ROWS)
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text().replace(str(begun / "data.jsonl"), str(file))
    )
    settings = data_config(folder, file)
    run.train(settings, resume=True, quiet=True)
    written(file, CHANGED["fewer rows"])
    run.train(settings, resume=True, quiet=True)  # it has ended, so that nothing reads the data
    shutil.rmtree(folder / "final")
    with pytest.raises(DataChanged):
        run.train(settings, resume=True, quiet=True)
    (folder / DATA).unlink()
    run.train(settings, resume=True, quiet=True)
    assert (folder / "final").is_dir()
    assert json.loads((folder / DATA).read_text())["gsm8k, train"] == fingerprint(
        [build_task(settings.task, "train", 3)[i] for i in range(29)]
    )


@pytest.mark.slow
def test_evaluation_and_curriculum_count_as_data(tmp_path):
    file, later = tmp_path / "data.jsonl", tmp_path / "later.jsonl"
    written(file, ROWS)
    written(later, ROWS)
    stage = {"schedule": {"curriculum": [{"update": 2, "task": {"source": str(later)}}]}}
    settings = data_config(tmp_path / "run", file, **stage)
    run.train(settings, resume=False, quiet=True)
    shutil.rmtree(tmp_path / "run/final")
    written(later, ROWS[1:])
    with pytest.raises(DataChanged, match="the data set 'gsm8k, train from update 2' has changed"):
        run.train(settings, resume=True, quiet=True)
    with pytest.raises(DataChanged, match="the data set 'gsm8k, train from update 2' has changed"):
        build_trainer(settings, quiet=True).train(resume_from_checkpoint=True)


def test_a_fingerprint_is_of_content_and_order_and_does_not_read_everything(monkeypatch):
    monkeypatch.setattr("trl_ext.files.fingerprint.MOST", 1000)
    reads = 0

    class Large:
        def __init__(self, size, odd=-1):
            self.size, self.odd = size, odd

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            nonlocal reads
            reads += 1
            return [index, index == self.odd]

    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([1, 2]) != fingerprint([2, 1]) != fingerprint([[2], 1])
    assert fingerprint(Large(1_500)) == fingerprint(Large(1_500))
    assert fingerprint(Large(1_500)) != fingerprint(Large(1_501))
    assert fingerprint(Large(900)) != fingerprint(Large(900, odd=678))
    reads = 0
    fingerprint(Large(10**12))
    assert reads <= 1_200
    assert fingerprint(Arithmetic(largest=9)) != fingerprint(Arithmetic(largest=9, seed=1))
    assert fingerprint([]) == {"rows": 0, "sha256": fingerprint([])["sha256"]}


def test_rows_that_json_cannot_hold_or_that_are_drawn_at_random_do_not_stop_a_resume():
    class Picture:
        pass

    class Augmented:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(1).item()

    assert fingerprint([{"prompt": "a", "image": Picture()}]) == fingerprint([{"prompt": "a", "image": Picture()}])
    assert fingerprint([torch.ones(2), {1, 2}, float("nan"), "\ud800"])["sha256"]
    assert fingerprint(Augmented()) == {"rows": 3, "sha256": None} == fingerprint(Augmented())


# -- a run's start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "empty configuration", "a lock", "half a configuration"])
def test_a_folder_whose_run_was_killed_before_it_began_can_be_used(tmp_path, left):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in {"empty configuration": ["config.yaml"], "a lock": [".lock", ".lock-owner"],
                 "half a configuration": [".partial-123-config.yaml"]}.get(left, []):  # fmt: skip
        (folder / name).write_text("")
    with pytest.raises(CheckpointError, match=r"holds no run to resume; start without --resume"):
        run.train(config(folder), resume=True, quiet=True)
    must_be_free(folder)
    claim(folder, ResolvedRun(config(folder)), resume=False)
    claim(folder, ResolvedRun(config(folder)), resume=True)
    with pytest.raises(RunExists):
        must_be_free(folder)


def test_a_folder_with_something_of_the_users_is_left_alone_without_a_new_file(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / DATA).write_text("mine")
    with pytest.raises(RunExists, match="exists and is not empty; nothing was overwritten"):
        run.train(config(folder), resume=False, quiet=True)
    assert names(folder) == [DATA] and not (folder / ".lock").exists() and (folder / DATA).read_text() == "mine"
    with pytest.raises(CheckpointError, match="holds no run to resume; start without --resume"):
        run.train(config(tmp_path / "new"), resume=True, quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_run_that_cannot_start_leaves_a_folder_that_a_corrected_one_can_have(tmp_path):
    folder = tmp_path / "run"
    wrong = data_config(folder, tmp_path / "missing.jsonl")
    with pytest.raises(TaskError, match="no such file"):
        run.train(wrong, resume=False, quiet=True)
    must_be_free(folder)


def test_a_disk_without_room_for_a_checkpoint_is_said_before_training(ended, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    for free, refused in ((10_000, True), (10**9, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        for folder, wanted in ((tmp_path / "new", None), (ended, "checkpoint-2")):
            trainer = resumed_trainer(folder, save_steps=1)
            trainer.state.global_step = 0
            if refused:
                with pytest.raises(CheckpointError, match=r"GB or more, but 0\.00 GB are free; free some space"):
                    trainer.train(resume_from_checkpoint=wanted)
    assert "checkpoint-4" in names(ended)


def test_a_checkpoint_under_another_number_is_refused_because_the_run_would_write_that_number(ended):
    (ended / "checkpoint-4").rename(ended / "checkpoint-7")
    with pytest.raises(CheckpointError, match=r"checkpoint-7: is of update 4; give it that number"):
        resumed_trainer(ended).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_checkpoint_on_another_disk_is_gone_on_from_through_its_link(calm, ended, tmp_path):
    (ended / "checkpoint-2").rename(tmp_path / "moved")
    (ended / "checkpoint-2").symlink_to(tmp_path / "moved")
    (ended / "checkpoint-9").symlink_to("checkpoint-9")  # a link to itself
    resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-2")
    assert steps(ended / "metrics.jsonl") == [1, 2, 3, 4] and "checkpoint-9.abandoned" in names(ended)


@pytest.mark.parametrize("text", ["{", "[]", '{"gsm8k, train": 3}', '{"gsm8k, train": {"rows": 3}}'])
def test_damaged_fingerprints_are_said(tmp_path, text):
    (tmp_path / DATA).write_text(text)
    with pytest.raises(DataChanged, match=r"is damaged, .* remove it to go on"):
        check_data(tmp_path, {"gsm8k, train": fingerprint([1])})


def test_what_a_kill_left_of_a_rewind_is_removed(ended):
    for name in (".partial-77-metrics.jsonl", ".partial-77-metrics.jsonl.abandoned"):
        (ended / name).write_text("half")
    resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-3")
    assert not list(ended.glob(".partial-*"))


@pytest.mark.parametrize("change", some(["flip", "cut", "remove"], 0))
def test_a_warm_start_that_is_damaged_is_no_reference(calm, ended, change):
    shutil.rmtree(ended / "final")
    file = ended / "initial/ann/model.safetensors"
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(
        {"flip": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]}.get(change, content[:half])
    )
    if change == "remove":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"restore them, or remove .*initial to make the same warm start again"):
        run.train(config(ended), resume=True, quiet=True)
    shutil.rmtree(ended / "initial")
    shutil.rmtree(ended / "checkpoint-4")
    run.train(config(ended), resume=True, quiet=True)
    same_end(ended, calm)


def test_a_damaged_evaluation_is_named(ended):
    shutil.rmtree(ended / "final")
    for text in ('{"tur', "[]", "{}"):
        (ended / "evaluation_before.json").write_text(text)
        with pytest.raises(RunError, match=r"evaluation_before\.json: is damaged .* remove it"):
            run.train(config(ended), resume=True, quiet=True)


def test_a_run_that_lost_its_configuration_is_not_sent_in_circles(ended):
    (ended / "config.yaml").unlink()
    with pytest.raises(RunExists, match=r"nothing was overwritten\. Choose another folder"):
        run.train(config(ended), resume=False, quiet=True)
    with pytest.raises(CheckpointError, match=r"no config\.yaml, .*; restore it, or start in another folder"):
        run.train(config(ended), resume=True, quiet=True)


def cut(file, to):
    file.write_bytes(file.read_bytes()[:to])


def without(file, line):
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))


LOSSES = {
    "half a line": ("dialogues.jsonl", lambda file: cut(file, -50)),
    "a line in the middle": ("metrics.jsonl", lambda file: without(file, 1)),
    "the last line": ("metrics.jsonl", lambda file: without(file, 3)),
    "all metrics": ("metrics.jsonl", Path.unlink),
    "all dialogues": ("dialogues.jsonl", Path.unlink),
}


@pytest.mark.parametrize("loss", some(LOSSES, 1))
def test_records_that_are_lost_before_a_resume_are_said(calm, ended, caplog, loss):
    shutil.rmtree(ended / "final")
    name, lose = LOSSES[loss]
    had = (ended / name).stat().st_size
    lose(ended / name)
    run.train(config(ended), resume=True, quiet=True)
    left = (ended / name).stat().st_size if (ended / name).exists() else 0
    assert f"{ended / name}: {had - left} of the {had} bytes that it had at checkpoint-4 are missing" in caplog.text
    for agent in ("ann", "bob"):
        weights = [(folder / f"final/{agent}/model.safetensors").read_bytes() for folder in (calm, ended)]
        assert weights[0] == weights[1], "the training itself lacks nothing"


@pytest.mark.slow
def test_whole_records_are_not_said_to_be_lost(ended, caplog):
    """A checkpoint knows how long the records were. Later ones that a resume sets aside are not missing."""
    lengths = read_state(ended / "checkpoint-2")["records"]
    assert lengths == {
        name: sum(len(line) for line in (ended / name).read_bytes().splitlines(keepends=True) if json.loads(line)["step"] <= 2)
        for name in ("metrics.jsonl", "dialogues.jsonl")
    }  # fmt: skip
    resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-2")
    cut(ended / "dialogues.jsonl", -1)  # the break after a whole line is not a loss, and comes back
    resumed_trainer(ended).train(resume_from_checkpoint="checkpoint-4")
    assert "missing" not in caplog.text


@pytest.mark.parametrize(
    "left", some(["empty", "empty folders", "hidden", "a link", "a link that leads nowhere", "links", "a file"], 0, 5)
)
def test_a_final_without_weights_is_no_end(calm, ended, tmp_path, caplog, left):
    (ended / "final").rename(tmp_path / "elsewhere")
    final = ended / "final"
    if left.startswith("empty"):
        (final if left == "empty" else final / "ann").mkdir(parents=True)
    elif left == "a file":
        final.write_text("")
    elif left in ("hidden", "links"):
        (final / "ann").mkdir(parents=True)
        (final / ".DS_Store").write_text("")
        if left == "links":
            (final / "ann/model.safetensors").symlink_to(tmp_path / "elsewhere/ann/model.safetensors")
    else:
        final.symlink_to(tmp_path / ("elsewhere" if left == "a link" else "nowhere"))
    assert not read_run(ended).finished
    run.train(config(ended), resume=True, quiet=True)
    same_end(ended, calm)
    assert f"{final}: holds no weights; it is now {final}.abandoned" in caplog.text and read_run(ended).finished
    assert final.is_dir() and not final.is_symlink()
