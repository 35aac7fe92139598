"""``maporl jobs``: run a configuration on Hugging Face Jobs, on a machine that is rented for as long as it takes."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, echo, load_config
from maporl.config import Config
from maporl.config.command_line import command
from maporl.config.parse import to_yaml
from maporl.errors import Fault, RunError, one_line, refuse

app = typer.Typer(help="Run a configuration on Hugging Face Jobs.", no_args_is_help=True)
OUTPUT = "run"
"""The folder of the run in the job."""
SCRIPT = '''"""Train a team, and push it with its page."""

import subprocess
import sys
from pathlib import Path

Path("team.yaml").write_text({config!r}, encoding="utf-8")
trained = subprocess.run([sys.executable, "-m", "maporl", "train", "team.yaml", "--quiet"])
if trained.returncode:
    sys.exit(trained.returncode)
sys.exit(subprocess.run([sys.executable, "-m", "maporl", "push", {output!r}, {name!r}, *{private!r}]).returncode)
'''


@app.callback()
def jobs() -> None:
    """Run a configuration on Hugging Face Jobs."""


@app.command()
@command
def train(
    *,
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    address: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="ADDRESS",
            help="Where the job installs maporl from, such as git+https://github.com/ORG/maporl@COMMIT.",
        ),
    ],
    flavor: Annotated[str, typer.Option("--flavor", help="The machine, such as a10g-small (hf jobs hardware).")],
    name: Annotated[str, typer.Option("--to", metavar="ORG/NAME", help="The repository that gets team and page.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, where it is new.")] = False,
    extras: Annotated[
        list[str] | None, typer.Option("--extra", help="An extra to install, such as tinker.", show_default=False)
    ] = None,
    secrets: Annotated[
        list[str] | None,
        typer.Option("--secret", help="A variable of this environment that the job gets.", show_default=False),
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="The longest that it may take, such as 90m or 8h.")] = "8h",
) -> None:
    """Train a configuration in a job, push the team and its page to the hub, and print the address of the log.

    The job installs maporl from an address, and gets the configuration and your Hugging Face token. Your account pays
    for it.
    """
    settings = load_config(values, config, set_)
    refuse(stays_here(settings))
    echo(f"log: {start(settings, address, flavor, name, private, extras or [], secrets or [], timeout)}")


def stays_here(config: Config) -> list[Fault]:
    """Return what a configuration has on this machine, which a job cannot read."""
    named = {"pythonpath": config.pythonpath} if config.pythonpath else {}
    for agent, section in config.agents.items():
        files = {key: getattr(section, key) for key in ("model", "tokenizer", "adapter", "chat_template")}
        named |= {f"agents.{agent}.{key}": one for key, one in files.items() if one and Path(str(one)).exists()}
    remedy = "name what is on the hub, or is installed with maporl"
    return [
        Fault(key, f"{one!r:.200} is on this machine, and a job cannot read it", remedy) for key, one in named.items()
    ]


def start(
    config: Config,
    address: str,
    flavor: str,
    name: str,
    private: bool,
    extras: list[str],
    secrets: list[str],
    timeout: str,
) -> str:
    """Start a job, and return the address of its log.

    Raises:
        RunError: the Hugging Face token or a secret is missing, or the service refuses the job.
    """
    from huggingface_hub import get_token, run_uv_job

    token = get_token()
    missing = ["a Hugging Face token (hf auth login)"] if token is None else []
    missing += [f"the variable {variable}" for variable in secrets if variable not in os.environ]
    if missing:
        raise RunError(f"maporl jobs: lacks {' and '.join(missing)}")
    text = to_yaml(replace(config, output_dir=OUTPUT))
    packages = ",".join(dict.fromkeys(["push", *extras]))
    given: dict[str, Any] = {variable: os.environ[variable] for variable in secrets} | {"HF_TOKEN": token}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train_team.py")
        script.write_text(
            SCRIPT.format(config=text, output=OUTPUT, name=name, private=["--private"] if private else []), "utf-8"
        )
        try:
            job = run_uv_job(
                str(script),
                dependencies=[f"maporl[{packages}] @ {address}"],
                flavor=flavor,
                secrets=given,
                timeout=timeout,
                token=token,
            )
        except Exception as error:
            said = one_line(error, 300)
            raise RunError(f"maporl jobs: the job was not started ({type(error).__name__}: {said})") from error
    return job.url
