"""A name that becomes a part of a path stays in its folder, wherever the name came from and whatever it is."""

import ast
import random
from types import SimpleNamespace as Thing

import pytest
import yaml
from folders import ROOT
from peft import PeftModel

from maporl import Team
from maporl.config import parse_config
from maporl.config.agents import section_faults
from maporl.config.algorithm import OF_TEAM
from maporl.errors import ConfigError, RunError, refuse
from maporl.integrations.exporting import models
from maporl.integrations.exporting.folders import Folders
from maporl.integrations.hub import pull
from maporl.integrations.ray.member import log_of, write_stacks
from maporl.runs import build, loop_stage
from maporl.storage.disk_cache import DiskCache
from maporl.storage.run_folder import own_places
from maporl.studies.crossplay import entrants
from maporl.team import saved
from maporl.team.saving import SavedTeam
from maporl.team.weights import load_initial, load_trained_weights
from trl_ext.files.paths import UnsafeName, below, fault_of_name, within
from trl_ext.files.stacks import Listener
from trl_ext.learning import checkpoint
from trl_ext.learning.policy import save_weights

OUT = ("", ".", "..", "/", "/etc", "../x", "a/b", "a/../../b", "a\\b", ".hidden", "a\0b", "a\nb", "\u202ex", "a" * 201)
FINE = ("ann", "ann-turn1", "Qwen2.5", "a b", "anaïs", "ann_past", "a" * 200)


def test_a_name_is_one_plain_part_of_a_path(tmp_path):
    for name in OUT:
        assert fault_of_name(name), name
        with pytest.raises(UnsafeName, match="cannot name a part of"):
            below(tmp_path, name)
    for name in FINE:
        assert not fault_of_name(name) and below(tmp_path, name) == tmp_path / name
    assert within(tmp_path, "initial/ann/base") == tmp_path / "initial/ann/base"
    for path in ("/etc", "a/../b", "a/.b", "../a"):
        with pytest.raises(UnsafeName):
            within(tmp_path, path)


def test_no_name_of_random_signs_leaves_its_folder(tmp_path):
    draw = random.Random(0)
    for _ in range(3000):
        name = "".join(draw.choices("ab./\\~ \0\n:é-", k=draw.randint(0, 6)))
        try:
            place = below(tmp_path, name)
        except UnsafeName:
            continue
        assert place.resolve().parent == tmp_path.resolve() and place.name == name


EVIL = "../../somewhere"
TOKENIZER = Thing(save_pretrained=print)


def policy(**more):
    parts = {"model": None, "adapter": None, "tokenizer": TOKENIZER, "save": print, "load": print, "algorithm": OF_TEAM}
    return Thing(name=EVIL, trainable=True, agents=["ann"], **parts, **more)


def of_class(cls, **attributes):
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def config(folder, section):
    return Thing(
        output_dir=str(folder), agents={"ann": Thing(policy=EVIL, policy_per="agent", weights=True, **section)}
    )


def record(folder, saves):
    made = of_class(
        SavedTeam,
        policies_of={"ann": [policy()]},
        _owners={id(None): EVIL, id(TOKENIZER): EVIL},
        _names={id(None): "base"},
        _saves_weights=lambda p: saves,
    )
    made.save(folder, folder)


def read(folder, monkeypatch):
    monkeypatch.setattr(saved, "refuse", lambda *arguments: None)
    values = {"output_dir": "x", "agents": {"ann": {"model": "org/base", "policy": EVIL}}, "task": {}, "protocol": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    saved.read_team(folder)


PLACES = {
    "maporl/integrations/exporting/folders.py:Folders.write": lambda folder, patch: of_class(Folders, target=folder, merge=False).write(
        Thing(name=EVIL, is_adapter=False)
    ),
    "maporl/integrations/exporting/models.py:_weights": lambda folder, patch: models._weights(
        Thing(trainable=True, adapter=None), Thing(name=EVIL), folder, folder
    ),
    "maporl/integrations/ray/member.py:log_of": lambda folder, patch: log_of(folder, EVIL),
    "maporl/integrations/ray/member.py:write_stacks": lambda folder, patch: write_stacks(folder, EVIL, ""),
    "maporl/runs/build.py:load_checkpoint_weights": lambda folder, patch: build.load_checkpoint_weights({"a": policy()}, folder),
    "maporl/studies/crossplay/entrants.py:_check_frozen": lambda folder, patch: entrants._check_frozen(
        Thing(folder=folder, config=config(folder, {"tiny": {}, "trainable": False}))
    ),
    "maporl/loops/run_stage.py:save_team": lambda folder, patch: loop_stage.save_team(Thing(policies={EVIL: policy()}), folder),
    "maporl/storage/disk_cache.py:DiskCache.__init__": lambda folder, patch: DiskCache(folder, EVIL),
    "maporl/team/saved.py:read_team": read,
    "maporl/team/saved.py:check_complete": lambda folder, patch: saved.check_complete(config(folder, {"trainable": True}), folder),
    "maporl/team/weights.py:load_initial": lambda folder, patch: load_initial([policy()], folder),
    "maporl/team/weights.py:load_trained_weights": lambda folder, patch: load_trained_weights({EVIL: policy()}, folder),
    "maporl/team/saving.py:SavedTeam.save": lambda folder, patch: record(folder, saves=True),
    "maporl/team/saving.py:SavedTeam.save, a tokenizer": lambda folder, patch: record(folder, saves=False),
    "trl_ext/learning/checkpoint.py:Learners.load": lambda folder, patch: checkpoint.Learners({EVIL: None}).load(Thing(iterdir=lambda: [Thing(name=EVIL)])),
    "trl_ext/learning/checkpoint.py:_SavingLearners.__init__": lambda folder, patch: checkpoint.Learners({EVIL: None}).begin_saving(folder),
    "trl_ext/learning/checkpoint.py:_save_rest": lambda folder, patch: checkpoint._save_rest(folder, {}, {EVIL: None}),
    "trl_ext/learning/checkpoint.py:load_checkpoint": lambda folder, patch: checkpoint.load_checkpoint(folder, Thing(load=print), {EVIL: Thing(load=print)}),
    "trl_ext/learning/policy.py:save_weights": lambda folder, patch: save_weights(of_class(PeftModel, save_pretrained=lambda *a, **k: None), EVIL, folder),
    "trl_ext/files/stacks.py:Listener._write": lambda folder, patch: of_class(Listener, folder=folder)._write(EVIL),
}  # fmt: skip
"""Functions that join a word of a configuration to a path, with a call of each that joins ``../../somewhere``."""
DEEPER = {
    "maporl/integrations/vllm/engine.py:VLLMEngine._send_adapter",
    "maporl/loops/run_stage.py:StageRun._ranked",
    "maporl/loops/run_stage.py:StageRun._train_on",
    "maporl/loops/run_stage.py:StageRun._train_turn_critics",
    "maporl/loops/run_stage.py:team_with",
    "maporl/loops/sft.py:_train_policies",
    "maporl/loops/stages.py:train_jointly",
    "maporl/runs/build.py:_begin_once",
    "maporl/training/team_loop.py:TeamLoop.save_learner_policy",
    "trl_ext/trainer/loop.py:PPOLoop.save_learner_policy",
}
"""Those that only a whole run reaches."""


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_joins_a_configured_word_stays_in_its_folder(place, tmp_path, monkeypatch):
    folder = tmp_path / "one/two"
    folder.mkdir(parents=True)
    with pytest.raises(UnsafeName, match="cannot name a part of"):
        PLACES[place](folder, monkeypatch)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


WORDS = {"name", "policy", "policies", "adapter", "agent", "source", "stage", "tool", "environment", "old", "new"}
"""What variables are called that hold a word of a configuration."""
OTHERWISE = {
    "maporl/integrations/exporting/command.py:export_for": {"model.name"},  # which is written by then
    "maporl/integrations/exporting/folders.py:Folders._base": {"name"},
    "maporl/integrations/exporting/folders.py:Folders._copy": {"file.name"},
    "maporl/integrations/exporting/folders.py:Folders.write": {"name"},
    "maporl/integrations/exporting/serving.py:write_texts": {"name"},
    "maporl/loops/command.py:sft": {"policy"},  # is shown
    "trl_ext/files/manifest.py:verify": {"name"},  # every name of a manifest is checked when it is read
    # names of what the folder has already
    "maporl/runs/dump.py:dump": {"name"},
    "maporl/integrations/exporting/plain.py:export": {"policy.name"},
    "maporl/loops/run.py:Loop._end": {"policy.name"},
    "maporl/integrations/hub/pack.py:pack": {"policy"},
    "trl_ext/learning/policy.py:save_weights": {"path.name"},
    # names that stand in the code
    "maporl/report/read.py:RunReader._new": {"name"},
    "maporl/report/read.py:RunReader._take": {"name"},
    "maporl/report/read.py:RunReader._whole": {"name"},
    "maporl/report/read.py:RunReader.read": {"name"},
    "maporl/report/read.py:RunReader._set_back": {"name"},
    "maporl/report/read.py:_must_be_run": {"name"},
    "maporl/loops/run.py:Loop._part": {"name"},
    "maporl/storage/run_folder.py:RunFolder.set_results_aside": {"name"},
    "maporl/training/run_record.py:RunRecord._write": {"name"},
    "maporl/training/run_record.py:evaluate_again": {"name"},
    "maporl/training/run_record.py:RunRecord.keep_team": {"name"},
    "maporl/training/run_record.py:RunRecord.must_be_new": {"name"},
}
"""The joins without ``below``, and why they need none."""


def functions(tree, outer=""):
    """Every function of a module with its dotted name. What stands in a class is named after it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{outer}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{node.name}", node


def words(node):
    """The variables in a part of a path that are called like words of a configuration."""
    if isinstance(node, ast.JoinedStr):
        return {word for part in node.values if isinstance(part, ast.FormattedValue) for word in words(part.value)}
    called = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return {ast.unparse(node)} if called in WORDS else set()


def test_the_list_of_these_places_is_whole():
    checked, joined = set(), {}
    for file in (
        path for package in ("maporl", "trl_ext", "reward_server") for path in sorted(ROOT.glob(f"{package}/**/*.py"))
    ):
        source = file.read_text(encoding="utf-8")
        if "/" not in source:
            continue
        for name, function in functions(ast.parse(source)):
            place = f"{file.relative_to(ROOT)}:{name}"
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "below":
                    checked.add(place)
                elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and (found := words(node.right)):
                    joined.setdefault(place, set()).update(found)
    checked.discard("trl_ext/files/paths.py:within")
    joined.pop("trl_ext/files/paths.py:below")
    assert {place.partition(",")[0] for place in PLACES} | DEEPER == checked, "a place needs a call in PLACES"
    assert joined == OTHERWISE, "join words of a configuration by trl_ext.files.paths.below"


CONFIG = {"output_dir": "x", "task": {"name": "toy_sum"}, "protocol": {"name": "debate", "turns": 2}}


@pytest.mark.parametrize("key", ["policy", "policy_per"])
@pytest.mark.parametrize("name", OUT)
def test_a_configuration_names_no_folder_elsewhere(tmp_path, key, name):
    ann = {"tiny": {}, key: name if key == "policy" else ["ann", name]}
    said = rf"x.yaml: agents.ann.{key}.*: (.* the name of a folder|expected a text that)"
    with pytest.raises(ConfigError, match=said):
        refuse(section_faults(parse_config({**CONFIG, "agents": {"ann": ann}}, "x.yaml")), "x.yaml")


def test_policies_for_each_turn_are_some():
    with pytest.raises(ConfigError, match="names no policy; list one for each turn"):
        refuse(section_faults(parse_config({**CONFIG, "agents": {"ann": {"tiny": {}, "policy_per": []}}})), "x.yaml")


def test_a_strangers_team_touches_nothing_of_the_users(tmp_path, monkeypatch):
    """A team from the hub that names a folder of the user as a turn's policy: it is refused, and the folder stays as it
    is."""
    mine, team = tmp_path / "thesis", tmp_path / "cache/snapshot"
    mine.mkdir()
    team.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    (mine / "config.json").write_text("mine")
    monkeypatch.setattr(pull, "snapshot_download", lambda name, **options: str(team))
    for per in (["ann", str(mine)], [str(mine), "ann"], ["ann", "../../thesis"]):
        values = {**CONFIG, "agents": {"ann": {"model": "org/base", "policy_per": per}}}
        (team / "config.yaml").write_text(yaml.safe_dump(values))
        for pulled in ("org/team", str(team)):
            with pytest.raises((ConfigError, UnsafeName, RunError)):
                Team.from_pretrained(pulled)
    model = {"ann": {"model": f"./{mine}", "tokenizer": f"x/{mine}"}}
    assert own_places(model["ann"], "x", team) == {}, "what begins with a slash is not in the folder"
    assert {p.name: p.read_text() for p in mine.iterdir()} == {"thesis.txt": "years of work", "config.json": "mine"}
