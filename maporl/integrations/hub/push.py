"""Upload whole teams to the hub: each policy's adapter or model, the configuration, and a card with the results."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from maporl.errors import RunError, one_line
from maporl.integrations.hub.pack import must_not_be_links, pack, policies_in
from maporl.report.read import read_run
from maporl.storage.run_folder import FINAL


@dataclasses.dataclass(frozen=True)
class Pushed:
    """The content of a push: its address, the path and size in bytes of each file, and notes for the user.

    The notes say what was taken out, and what everybody can read.
    """

    address: str
    files: list[tuple[str, int]]
    notes: list[str]


def push(run: str | Path, name: str, private: bool = False, dry_run: bool = False, allow: Sequence[str] = ()) -> Pushed:
    """Upload the team of a finished run to the hub as ``name``.

    Other files of the repository stay. Only the files that a team consists of are uploaded. Paths of this machine,
    values of options with the name of a secret, and those of environment variables with such a name are taken out of
    the configuration, the cards and the report. Anything else that looks like a secret stops the push.

    Args:
        run: the run's folder.
        name: the repository, ORG/NAME.
        private: whether a new repository is private.
        dry_run: whether to upload nothing, and only to return what would be uploaded.
        allow: the marks of texts that look like secrets and are not. An error of an earlier push names them.

    Raises:
        RunError: the run has not ended, records of it are damaged, a file of the team is a link, a text looks like a
            secret, the extra ``push`` is not installed, ``name`` is not a name on the hub, or the upload failed.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RunError(f"{name!r}: is not a name on the hub ({one_line(error, 200)}); expected ORG/NAME") from None
    if "/" not in name:
        raise RunError(f"{name!r}: expected ORG/NAME, an organisation's or your own name before the team's")
    record = read_run(run)
    if record.damaged:
        raise RunError(f"{record.damaged[0]} Mend it, or remove it, and push again")
    must_not_be_links(record.folder / FINAL)
    if not record.config or not policies_in(record):
        raise RunError(
            f"{run}: has no final weights and config.yaml; push a run that has ended, or a folder that Team.save wrote"
        )
    contents, notes = pack(record, name, allow)
    files = [(path, len(c) if isinstance(c, bytes) else c.stat().st_size) for path, c in sorted(contents.items())]
    address = f"https://huggingface.co/{name}"
    if dry_run:
        return Pushed(address, files, notes)
    try:
        api = HfApi()
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        operations = [CommitOperationAdd(path, c if isinstance(c, bytes) else str(c)) for path, c in contents.items()]
        done = api.create_commit(repository, operations, commit_message="Team trained with maporl")
        address = str(done.repo_url)
    except LocalTokenNotFoundError:
        raise RunError(f"{name}: nobody is logged in; run: hf auth login") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise RunError(
            f"{name}: could not be pushed ({one_line(error, 200)}); an empty repository may have been made"
        ) from None
    return Pushed(address, files, notes)
