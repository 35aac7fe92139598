"""What one of two processes keeps of a team with frozen models; started by tests/trl_ext/sharding/test_team_memory.py.

    python tests/support/team_memory_worker.py FOLDER

``FOLDER/config.json`` is the configuration. Every process writes ``rankN.json``.
"""

import json
import os
import sys
from pathlib import Path

from memory_worker import held

from maporl.config import parse_config
from maporl.runs.build import build_trainer
from maporl.team import loading
from trl_ext.models.forward import base_of
from trl_ext.process import distributed


def main() -> None:
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        from distributed_worker import skip_compilation

        skip_compilation()
    folder = Path(sys.argv[1])
    config = parse_config(json.loads((folder / "config.json").read_text()), "test")
    places = []
    read = loading.read_model

    def noted(*args, **options):
        model = read(*args, **options)
        places.append(model.device.type)
        return model

    loading.read_model = noted
    before = held()
    trainer = build_trainer(config, quiet=True)
    found = {"read": places, "strategy": type(trainer.learners["ann"].strategy).__name__}
    bases = {id(base_of(p.model)): base_of(p.model) for p in trainer.team.policies.values()}
    with trainer.whole_weights():
        whole = dict(trainer.team.policies["cat"].model.named_parameters())
        found["sum"] = sum(float(p.detach().double().abs().sum()) for p in whole.values())
        parameters = sum(p.numel() for p in whole.values())
    found["bases"] = len(bases)
    found["built"] = (held() - before) / parameters
    trainer.train()
    found["trained"] = (held() - before) / parameters
    with trainer.whole_weights():
        after = trainer.team.policies["cat"].model.named_parameters()
        found["sum after"] = sum(float(p.detach().double().abs().sum()) for _, p in after)
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
