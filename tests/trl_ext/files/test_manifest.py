"""A checkpoint is what its manifest lists: nothing is missing, nothing differs, and nothing is there besides."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from trl_ext.files.checkpoints import list_checkpoints, newest_whole, remove_old, set_later_aside
from trl_ext.files.manifest import MANIFEST, CheckpointError, DamagedCheckpoint, verify, write_manifest
from trl_ext.files.set_aside import set_aside

FILES = ("state.json", "rng.safetensors", "policies/ann/model.safetensors", "others/opponents/snapshot-0.safetensors")
HASH = "0" * 64


def checkpoint(folder, number=2):
    target = folder / f"checkpoint-{number}"
    for name in FILES:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(f"{name} {number}")
    write_manifest(target)
    return target


def listed(folder):
    return json.loads((folder / MANIFEST).read_text())


MANIFESTS = {
    "empty file": "",
    "no UTF-8": b"\xff\xfe{}",
    "deep": "[" * 100_000,
    "nothing": {},
    "a list of names": list(FILES),
    "null": None,
    "without the state": lambda m: {k: v for k, v in m.items() if k != "state.json"},
    "without random states": lambda m: {k: v for k, v in m.items() if k != "rng.safetensors"},
    "without policies": lambda m: {k: v for k, v in m.items() if not k.startswith("policies/")},
    "hash a number": lambda m: m | {"state.json": 5},
    "hash a record": lambda m: {k: {"sha256": v} for k, v in m.items()},
    "hash cut": lambda m: {k: v[:-1] for k, v in m.items()},
    "hash in capitals": lambda m: {k: v.upper() for k, v in m.items()},
    "unknown algorithm": lambda m: {k: f"crc32:{v}" for k, v in m.items()},
    "another hash": lambda m: m | {"state.json": HASH},
    "a missing file": lambda m: m | {"policies/ann/config.json": HASH},
    "a folder as file": lambda m: m | {"policies/ann": HASH},
    "an escape for the terminal": lambda m: m | {"\x1b[2J": HASH},
    "itself": lambda m: m | {MANIFEST: HASH},
    "a file outside": lambda m: m | {"../secret": HASH},
    "an absolute file": lambda m: m | {"/etc/hostname": HASH},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_does_not_list_the_checkpoint_is_damage(tmp_path, name):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    wrong = MANIFESTS[name]
    content = json.dumps(wrong(listed(newer))) if callable(wrong) else wrong
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    (newer / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DamagedCheckpoint) as told:
        verify(newer)
    assert str(newer) in str(told.value) and "\n" not in str(told.value)
    assert newest_whole([older, newer]) == older


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove", "folder", "dangling", "grow"])
def test_damage_to_any_file_is_found(tmp_path, name, damage):
    folder = checkpoint(tmp_path)
    verify(folder)
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    changed = {"flip": bytes([content[0] ^ 1]) + content[1:], "cut": content[:-1], "empty": b"", "grow": content + b" "}
    if damage in changed:
        file.write_bytes(changed[damage])
    elif damage == "folder":
        file.mkdir()
    elif damage == "dangling":
        file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DamagedCheckpoint, match="is missing or damaged"):
        verify(folder)


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "policies/ann/model-00001.safetensors", "others/opponents/snapshot-1.safetensors", "policies/cy"],
)
def test_a_file_that_the_manifest_does_not_list_stops_the_resume_and_no_older_checkpoint_is_taken(tmp_path, name):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (newer / name).write_text("x")
    with pytest.raises(CheckpointError, match=r"', which is not in its MANIFEST\.json; move it elsewhere") as told:
        newest_whole([older, newer])
    assert not isinstance(told.value, DamagedCheckpoint)
    (newer / name).rename(newer / name.replace(Path(name).name, ".DS_Store"))  # file managers leave such files
    assert newest_whole([older, newer]) == newer


def test_a_disk_that_cannot_be_read_is_damage_and_a_file_without_permission_is_not(tmp_path, monkeypatch):
    folder, code = checkpoint(tmp_path), errno.EIO

    def failing(path):
        raise OSError(code, "it says", str(path))

    monkeypatch.setattr("trl_ext.files.manifest.digest_of", failing)
    with pytest.raises(DamagedCheckpoint, match=r"\.safetensors: it says"):
        verify(folder)
    code = errno.EACCES
    with pytest.raises(CheckpointError, match=r"cannot be read \(it says\); make it readable") as told:
        verify(folder)
    assert not isinstance(told.value, DamagedCheckpoint)


def test_set_aside_checkpoints_count_nowhere(tmp_path):
    for number in (1, 2, 10):
        checkpoint(tmp_path, number)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-11").symlink_to("gone")
    moved = set_later_aside(tmp_path, tmp_path / "checkpoint-2", 2, "abandoned")
    assert [p.name for p in moved] == [f"checkpoint-{n}.abandoned" for n in (11, 10, 3)], "the newest is moved first"
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    remove_old(tmp_path, 1)
    left = [f"checkpoint-{n}.abandoned" for n in (10, 11, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["checkpoint-2", *left])
    assert set_later_aside(tmp_path, tmp_path / "checkpoint-2", 2, "abandoned") == []


def test_what_is_set_aside_twice_has_two_names(tmp_path):
    names = []
    for turn in range(3):
        (tmp_path / "final").write_text(str(turn))
        names.append(set_aside(tmp_path / "final", "abandoned").name)
    assert names == ["final.abandoned", "final.abandoned-2", "final.abandoned-3"]
    assert [(tmp_path / name).read_text() for name in names] == ["0", "1", "2"]


def test_a_checkpoint_that_is_half_removed_is_none_and_one_that_cannot_be_removed_ends_no_run(
    tmp_path, monkeypatch, caplog
):
    for number in (1, 2, 3):
        checkpoint(tmp_path, number)

    def killed(path, *_, **__):
        (path / "rng.safetensors").unlink()
        raise KeyboardInterrupt

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_old(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    monkeypatch.setattr(shutil, "rmtree", lambda path: remove(path / "not there"))
    remove_old(tmp_path, 1)
    assert "checkpoint-2: could not be removed" in caplog.text and "remove it by hand" in caplog.text
