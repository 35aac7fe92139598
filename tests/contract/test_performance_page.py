"""``benchmarks/page.py``: the commands of docs/performance.md exist, and one command runs them all."""

import re
import shlex
import sys

import page
import pytest
from folders import ROOT

COMMANDS = [command for _, command in page.commands(page.PAGE.read_text())]


def test_every_command_of_the_page_is_run():
    blocks = re.findall(r"^```bash\n(.*?)^```", page.PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if "python benchmarks/" in line]
    others = ("benchmarks/page.py", "benchmarks/gpu_acceptance.py")  # the latter needs an accelerator
    assert [line for line in lines if not any(other in line for other in others)] == COMMANDS
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_a_script_and_options_that_exist(command):
    words = shlex.split(command)
    script = next(word for word in words if word.startswith("benchmarks/"))
    text = (ROOT / script).read_text()
    options = [word for word in words if word.startswith("--")]
    assert all(f'"{option}"' in text for option in options)
    after = words[words.index(script) + 1 :]
    if after and after[0].isalpha():
        assert f'"{after[0]}"' in text  # a subcommand


def run(monkeypatch, tmp_path, text, *options):
    """Run the command on a page with ``text``. Return its exit status."""
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(text)
    monkeypatch.setattr(sys, "argv", ["page.py", "--logs", str(tmp_path / "logs"), *options])
    with pytest.raises(SystemExit) as exit_:
        page.main()
    return exit_.value.code


def test_later_commands_run_where_one_fails_and_each_has_a_log(monkeypatch, tmp_path, capsys):
    text = (
        "```bash\n# 2 minutes\necho $MODEL > points.json\n# 1 minute\necho no; exit 3\n# 1 minute\ncat "
        "points.json\n```\n"
    )
    monkeypatch.setenv("MODEL", str(tmp_path))
    assert run(monkeypatch, tmp_path, text) == 1
    logs = {file.stem: file.read_text() for file in (tmp_path / "logs").glob("*.log")}
    assert sorted(logs) == ["1", "2", "3"]
    assert "echo no; exit 3\n\nno\n\nexit status 3 after 0.0 minutes\n" in logs["2"]
    assert f"\n{tmp_path}\n\nexit status 0" in logs["3"]
    assert "2 FAILED" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, text, "--only", "1", "3") == 0
    assert run(monkeypatch, tmp_path, text, "--only", "4") == 2
