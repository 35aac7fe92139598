"""Mutants of a small real run: each is shown, or refused in one line.

A seed makes a mutant, so that each can be made again.
"""

import json
import os
import random
import shutil

import pytest
import yaml
from hostile_runs import nested
from tiny_runs import config_of

from maporl.errors import UserError
from maporl.report.live import LivePage
from maporl.report.page import write_report
from maporl.report.read import RunReader
from maporl.report.terminal import frame
from maporl.runs.train import train
from maporl.studies.crossplay.entrants import read_entrants
from maporl.studies.crossplay.play import play_crossplay, write_crossplay
from trl_ext.files.jsonl import whole_lines

READ = (".yaml", ".json", ".jsonl")


ODD = [
    None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**9, 2**63, 10**400, -(10**18), 1e300, "", "x", "9" * 400, "\ud800",
    "\x00\x1b[31m", "\u202ex", "x" * 100_000, [], [1], [[]], [None], [{}], {}, {"a": 1}, {"": None}, ["a", None, 5], {"a": {"b": [1]}},
    nested(50), nested(300),
]  # fmt: skip
NAMES = ["", "x", "\ud800", "step", "time/x", "a" * 300, "eval_accuracy/turn_9", "accuracy/turn_1000000000", "turns"]
CONTENTS = [
    b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"5\n", b"NaN\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n", b"\x00" * 100,
    b'"' + b"x" * 100_000 + b'"\n', b"{" * 3000, b"a: &a [*a]\n", b"? [1]\n: 2\n", b"2020-99-99\n", b"!!python/object:os.system x\n",
    b"updates: !!timestamp x\n", b"a: 2020-01-01\n5: 6\n", b"agents: {1: {}, null: {tiny: 5}, ann: {model: [1], tiny: {layers: {}}}}\n",
]  # fmt: skip
FOLDERS = ["run", "r\u202en", "a b", "\x1b[31mred", "x" * 200, "a\nb"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a small trained run, with its evaluations and a cross-play."""
    folder = tmp_path_factory.mktemp("whole")
    for seed in (0, 1):
        more = {"seed": seed, "agents": {"ann": {}, "bob": {}, "cy": {}}, "evaluation": {"questions": 6}}
        run = config_of(folder / f"run{seed}", 2, more, per_device_train_batch_size=4, save_steps=0)
        train(run, resume=False, quiet=True)
    entrants = read_entrants([str(folder / f"run{seed}") for seed in (0, 1)], [])
    write_crossplay(play_crossplay(entrants, 0, quiet=True), entrants, None)
    return folder / "run0"


def places(value, at=()):
    """The path of every value within ``value``."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for key, own in inner:
        yield from places(own, (*at, key))


def odd(rng):
    """A new copy of an odd value, because a later change may put things into it."""
    return json.loads(json.dumps(rng.choice(ODD)))


def other_value(rng, value):
    """``value`` with a part replaced, removed, added or doubled."""
    for _ in range(rng.choice([1, 1, 1, 3])):
        *path, last = rng.choice(list(places(value))) or (None,)
        if last is None:
            return odd(rng)
        inside = value
        for key in path:
            inside = inside[key]
        how = rng.random()
        if how < 0.7:
            inside[last] = odd(rng)
        elif how < 0.85:
            del inside[last]
        elif isinstance(inside, dict):
            inside[rng.choice(NAMES)] = odd(rng)
        else:
            inside += inside[:3]
    return value


def other_content(rng, file):
    """Another content of ``file``: with another value, cut, with other bytes, doubled, or its lines in another
    order."""
    content, how = file.read_bytes(), rng.random()
    if how < 0.6 and content:
        if file.suffix == ".jsonl":
            lines = content.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(other_value(rng, json.loads(lines[at]))).encode()
            return b"\n".join(lines) + b"\n"
        read = yaml.safe_load if file.suffix == ".yaml" else json.loads
        return json.dumps(other_value(rng, read(content))).encode()
    if how < 0.7:
        return rng.choice(CONTENTS)
    at = rng.randrange(len(content) + 1)
    lines = content.splitlines(keepends=True)
    rng.shuffle(lines)
    noise = rng.randbytes(20)
    return rng.choice(
        [content[:at], content[:at] + noise + content[at + 20 :], content * 2, b"\xff\xfe" + content, b"".join(lines)]
    )


def mutate(rng, folder):
    file = rng.choice(sorted(path for path in folder.iterdir() if path.suffix in READ))
    if rng.random() < 0.8:
        file.write_bytes(other_content(rng, file))
        return
    kind = rng.choice(
        ["gone", "link to nothing", "link to itself", "folder", "pipe", "another file", "final", "stray link"]
    )
    if kind == "another file":
        taken = folder / rng.choice(["metrics.jsonl", "config.yaml", "evaluation_before.jsonl", "dialogues.jsonl"])
        return taken.write_bytes(file.read_bytes())
    if kind == "stray link":
        return (folder / rng.choice(["x.json", "a\nb.jsonl"])).symlink_to("/nonexistent")
    if kind == "final":
        shutil.rmtree(folder / "final")
        return (folder / "final").symlink_to("/nonexistent")
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind != "gone":
        file.symlink_to("/nonexistent" if kind == "link to nothing" else file)


def served(folder):
    page = LivePage(folder, 0)
    try:
        return page.page(), page.data(-1, -1)
    finally:
        page.server_close()


def ways_to_look(folder, whole):
    return {
        "report": lambda: write_report([folder], folder.parent / "one.html"),
        "compare": lambda: write_report([folder, whole], folder.parent / "two.html"),
        "watch": lambda: served(folder),
        "watch --tui": lambda: frame(RunReader(folder, keep=100).read(), 100),
        "crossplay": lambda: read_entrants([str(folder), str(whole)], []),
    }


@pytest.mark.slow
def test_hundreds_of_damaged_runs_are_shown_or_refused_in_one_line(whole, tmp_path):
    looks = refused = 0
    for seed in range(1000, 1500):
        rng = random.Random(seed)
        place = tmp_path / str(seed)
        folder = place / rng.choice(FOLDERS)
        shutil.copytree(whole, folder, symlinks=True)
        mutate(rng, folder)
        for name, look in ways_to_look(folder, whole).items():
            looks += 1
            try:
                look()
            except UserError as error:
                refused += 1
                message = str(error).replace(str(folder), "")
                assert message.strip() and "\n" not in message and len(message) < 4000, (seed, name, message)
            except Exception as error:
                raise AssertionError(f"mutant {seed}: {name}: {type(error).__name__}: {error!s:.200}") from error
        shutil.rmtree(place)
    assert looks == 2500 and 0.05 < refused / looks < 0.6


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "dialogues.jsonl", "evaluation_after.json", "crossplay.json", "audit.json"]
)
@pytest.mark.parametrize("kind", ["nowhere", "itself", "pipe"])
def test_a_link_that_leads_nowhere_is_named_and_no_pipe_is_waited_for(whole, tmp_path, name, kind):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(folder / name if kind == "itself" else "/nonexistent/x")
    told = {
        "nowhere": "is a link that leads nowhere",
        "itself": "Too many levels",
        "pipe": "expected a file, got a device or a pipe",
    }
    for look in list(ways_to_look(folder, whole).values())[:4]:
        with pytest.raises(UserError, match=rf"{folder}/{name}: .*{told[kind]}"):
            look()


def test_a_report_that_cannot_be_written_says_where_and_what_to_do(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    for output in ("/proc/report.html", tmp_path / "nowhere" / "x.html", tmp_path / ("x" * 300), "/dev/null", tmp_path):
        with pytest.raises(
            UserError, match=r"(cannot be written: .*; give --output|Give another name|give --output a file)"
        ):
            write_report([folder], output)
    folder.chmod(0o555)
    child = os.fork()  # the superuser may write everywhere, so another user does it
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                for place in (folder, *folder.parents):
                    if place != folder and place.stat().st_uid == 0 and len(place.parts) > 2:
                        place.chmod(0o755)
                os.setuid(65534)
            write_report([folder])
        except UserError as error:
            wanted = f"{folder}/report.html: cannot be written: Permission denied; give --output"
            status = 0 if wanted in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    folder.chmod(0o755)
    assert write_report([folder], tmp_path / "elsewhere.html").is_file()


def test_a_line_of_values_within_values_is_damage(tmp_path):
    (tmp_path / "x.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        list(whole_lines(tmp_path / "x.jsonl"))
