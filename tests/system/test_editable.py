"""An editable install, and a script that stands beside the clone."""

import shutil
import subprocess
import sys
import zipfile

from folders import ROOT

SCRIPT = """
import site, sys

site.addsitedir(sys.argv[1])  # as Python does with the environment's own folder, which -S leaves out
import maporl

print(maporl.__file__)
"""


def test_a_script_beside_a_clone_that_is_called_maporl_imports_the_package(tmp_path):
    """Python would rather take the clone, a folder without __init__.py, than ask a finder of setuptools."""
    clone, wheels, installed = (tmp_path / name for name in ("maporl", "wheels", "installed"))
    (clone / "maporl").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "maporl/__init__.py").write_text('__version__ = "0.1.0"\n')
    wheels.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    [wheel] = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    assert [file.read_text().strip() for file in installed.glob("*.pth")] == [str(clone)]
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-E", "-S", "script.py", str(installed)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == str(clone / "maporl/__init__.py")
