"""Sampling every training question many times, with labels: ``maporl verifier generate``.

The work is a fixed list of batches. After each batch its samples are written and then its number, so that a process
that is killed loses one batch at most. Whatever a file holds beyond the last counted batch is cut off.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm.auto import tqdm

from maporl.config.parse import to_yaml
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.storage.run_folder import RunExists
from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.verifier.data import MANIFEST, DataError, Sample
from maporl.verifier.options import GenerateOptions
from maporl.verifier.sampling import Speaker, label, seed_of
from trl_ext.files.atomic import replace_file


@dataclass(frozen=True)
class Shard:
    """The share of one process: of ``world`` processes, it samples the questions ``rank``, ``rank + world``, and so
    on."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> "Shard":
        """The share that ``accelerate launch`` gives this process, by its environment variables."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def questions(self, count: int) -> range:
        """The numbers of this process's questions out of ``count``."""
        return range(self.rank, count, self.world)


@dataclass
class Progress:
    """The files of one process: its whole batches, the bytes of its file, and the counts of its samples."""

    batches: int = 0
    bytes: int = 0
    right: int = 0
    wrong: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    complete: bool = False


def generate_samples(
    config: Config, task: Task, team: Team, folder: Path, options: GenerateOptions, shard: Shard, quiet: bool = False
) -> dict[str, Any]:
    """Sample and label this shard's questions into ``folder``, from where an earlier call stopped.

    Returns the manifest, which says "complete" once every process has finished.

    Raises:
        ConfigError: an option names no agent with a model, or the task has no training questions.
        DataError: the folder was begun with other options, or a file in it is shorter than it should be.
        RunExists: the folder holds something else.
    """
    speakers = [Speaker(config, team, name, "--agent") for name in _speaking(team, options)]
    judge = Speaker(config, team, options.judge, "--judge") if options.judge else None
    count = min(len(task), options.limit or len(task))
    if count == 0:
        raise ConfigError("task: the training split is empty")
    opening = ResolvedRun(config).protocol.opening
    manifest = _claim(folder, config, task, count, options, shard, speakers)
    progress = _resume(folder, shard)
    batches = list(_batches(len(speakers), count, options, shard))
    bar = tqdm(total=sum(map(len, batches)), initial=sum(map(len, batches[: progress.batches])), dynamic_ncols=True,
               desc="samples" if shard.world == 1 else f"samples {shard.rank}", disable=quiet)  # fmt: skip
    with bar, (folder / f"samples-{shard.rank}.jsonl").open("ab") as file:
        for batch in batches[progress.batches :]:
            samples, dropped = _sample(config, task, opening, speakers, judge, batch, count, options)
            file.write("".join(s.line() for s in samples).encode())
            file.flush()
            os.fsync(file.fileno())
            _count(progress, samples, dropped, file.tell())
            _save(folder, shard, progress)
            bar.update(len(batch))
            bar.set_postfix_str(f"{progress.right / max(1, progress.right + progress.wrong):.0%} right", refresh=False)
    progress.complete = True
    _save(folder, shard, progress)
    return _summarise(folder, manifest)


def _speaking(team: Team, options: GenerateOptions) -> tuple[str, ...]:
    """The agents that answer. Of agents with the same weights and the same instructions, only the first one does."""
    if options.agents:
        return tuple(dict.fromkeys(options.agents))
    heard: dict[tuple, str] = {}
    for name in team.policies_of:
        if name != options.judge or len(team.policies_of) == 1:
            heard.setdefault((team.policies_of[name][0].name, team.agents[name].system), name)
    return tuple(heard.values())


# -- one batch ----------------------------------------------------------------------------------------------------


def _batches(agents: int, count: int, options: GenerateOptions, shard: Shard) -> Iterator[range | list[int]]:
    """The positions of each batch. A position numbers agent, question and sample, in this order, over all processes."""
    for agent in range(agents):
        positions = [
            (agent * count + question) * options.per_question + sample
            for question in shard.questions(count)
            for sample in range(options.per_question)
        ]
        yield from (positions[i : i + options.batch_size] for i in range(0, len(positions), options.batch_size))


def _sample(
    config: Config,
    task: Task,
    opening: str,
    speakers: list[Speaker],
    judge: Speaker | None,
    batch: Any,
    count: int,
    options: Any,
) -> tuple[list[Sample], Counter]:
    """(samples, dropped): the labelled samples at the positions of a batch, and counts of those without a label."""
    rng = seed_of(config.seed, batch[0])
    temperature = rng.uniform(options.temperature_low, options.temperature_high)
    speaker = speakers[batch[0] // options.per_question // count]
    examples = [task[position // options.per_question % count] for position in batch]
    questions = [task.question(example) for example in examples]
    asked = [opening.replace("{question}", question) for question in questions]
    answers = speaker.generate(asked, temperature, options.batch_size, options.top_p, rng.getrandbits(62))
    samples, dropped = [], Counter[str]()
    labels = label(task, examples, answers, judge, options.batch_size)
    for position, example, question, answer, (correct, why) in zip(
        batch, examples, questions, answers, labels, strict=True
    ):
        if correct is None:
            dropped[why] += 1
        else:
            name = speaker.policy.name
            samples.append(Sample(example.id, question, answer, correct, temperature, name, position))
    return samples, dropped


# -- the folder ---------------------------------------------------------------------------------------------------


def _claim(
    folder: Path,
    config: Config,
    task: Task,
    count: int,
    options: GenerateOptions,
    shard: Shard,
    speakers: list[Speaker],
) -> dict[str, Any]:
    """Take a new folder for this work, or check that an old one belongs to it. Returns what identifies the work."""
    identity = {
        "models": {s.agent: config.agents[s.agent].model or "tiny" for s in speakers},
        "seed": config.seed,
        "config_sha256": _digest(to_yaml(config)),
        "questions_sha256": _digest(json.dumps([[task[i].id, task.question(task[i])] for i in range(count)])),
        "questions": count,
        "processes": shard.world,
        "options": json.loads(json.dumps(asdict(options))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MANIFEST
    with FileLock(folder / ".lock"):
        if file.is_file():
            manifest = json.loads(file.read_text())
            for key, value in identity.items():
                if manifest.get(key) != value:
                    raise DataError(
                        f"{folder}: was begun with another {key} (was {manifest.get(key)!r}, is {value!r}); use the "
                        "same configuration and options, or choose another folder (--output)"
                    )
        elif any(not p.name.startswith(".") for p in folder.iterdir()):
            raise RunExists(
                f"{folder}: is not empty and has no {MANIFEST}; nothing was overwritten. Choose another folder "
                "(--output)"
            )
        else:
            _write_manifest(folder, identity, [])
    return identity


def _resume(folder: Path, shard: Shard) -> Progress:
    """What this shard has done so far. Its file of samples is cut to that."""
    record, samples = folder / f"progress-{shard.rank}.json", folder / f"samples-{shard.rank}.jsonl"
    progress = _read_progress(record) if record.is_file() else Progress()
    there = samples.stat().st_size if samples.is_file() else 0
    if there < progress.bytes:
        raise DataError(
            f"{samples}: has {there} bytes, but {record.name} says {progress.bytes}; restore the file, or begin again "
            "in another folder (--output)"
        )
    if there > progress.bytes:
        os.truncate(samples, progress.bytes)
    return progress


def _count(progress: Progress, samples: list[Sample], dropped: Counter, size: int) -> None:
    progress.batches += 1
    progress.bytes = size
    progress.right += sum(s.correct for s in samples)
    progress.wrong += sum(not s.correct for s in samples)
    progress.dropped = dict(Counter(progress.dropped) + dropped)


def _save(folder: Path, shard: Shard, progress: Progress) -> None:
    replace_file(folder / f"progress-{shard.rank}.json", json.dumps(asdict(progress)))


def _read_progress(file: Path) -> Progress:
    return Progress(**json.loads(file.read_text()))


def _summarise(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest from every process's progress. A lock lets in one at a time, so that the last one sees all."""
    with FileLock(folder / ".lock"):
        records = [folder / f"progress-{rank}.json" for rank in range(identity["processes"])]
        return _write_manifest(folder, identity, [_read_progress(r) for r in records if r.is_file()])


def _write_manifest(folder: Path, identity: dict[str, Any], done: list[Progress]) -> dict[str, Any]:
    manifest = {
        **identity,
        "complete": len(done) == identity["processes"] and all(p.complete for p in done),
        "right": sum(p.right for p in done),
        "wrong": sum(p.wrong for p in done),
        "dropped": dict(sum((Counter(p.dropped) for p in done), Counter())),
    }
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1))
    return manifest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
