"""What two processes must do together although only one of them has work; started by tests/system/test_together.py.

    torchrun --nproc_per_node 2 tests/support/together_worker.py FOLDER

Each process writes what it found.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from one_policy import classifier
from vllm_engines import serve, team_of

from maporl import Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection
from maporl.config.schema import TinySection
from maporl.engines.text import TextEngine
from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import VLLMFailure
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.types import Dialogue, Example, Grade, Utterance
from maporl.verifier.cotraining import CoTraining
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from trl_ext.learning import invariants
from trl_ext.process import distributed
from trl_ext.sampling.request import Draw, TokenRequest


def build(alphabet):
    torch.manual_seed(0)
    section = TinySection(hidden_size=64, layers=2, alphabet=alphabet)
    tokenizer = build_tiny_tokenizer(section)
    return build_tiny_model(section, tokenizer), tokenizer


def rollouts(folder):
    """Train one update and evaluate on one question, which only the last process plays."""
    model, tokenizer = build("".join(sorted(set(PROBE + "0456789=;"))))
    server = serve(model, tokenizer, 1.0)
    url = f"http://127.0.0.1:{distributed.broadcast_from_main(server.server_port)}"  # all ask that of the main process
    team = team_of(model, tokenizer)
    args = MultiAgentPPOConfig(
        output_dir=str(folder / "run"), per_device_train_batch_size=1, gradient_accumulation_steps=1, total_episodes=2, temperature=1.0,
        response_length=2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, eval_questions=1, stop_token="none",
    )  # fmt: skip
    sections = dict.fromkeys(team.policies, VLLMSection(urls=[url], retries=0))
    engine = VLLMEngine(team.policies, sections, 1.0, folder / "adapters")
    found = {}
    try:
        engine.sample([TokenRequest("ann", [5, 6], Draw(2))])
    except VLLMFailure as error:
        found["early"] = str(error)
    trainer = MultiAgentPPOTrainer(
        args, team, Arithmetic(largest=9), Debate(turns=1), Arithmetic(largest=9, split="eval"), RewardSection(sources={"odd": 1.0}),
        sources={"odd": lambda dialogues, task: [[1.0 for _ in d.utterances] for d in dialogues]}, engines={"vllm": TextEngine(team.policies, engine, 2)},
    )  # fmt: skip
    trainer.train()
    found["loads"] = [
        body["lora_name"].split("-")[0] for path, body in server.requests if path == "/v1/load_lora_adapter"
    ]
    server.says["refusal"] = "no room for another adapter"
    try:
        engine.sync("bob", 1)
    except VLLMFailure as error:
        found["refused"] = str(error)
    return found


def verifiers():
    """Let the verifiers of the processes differ a little, as kernels make them differ, and train them together."""
    _, tokenizer = build("0123456789+=")
    verifier = Verifier(classifier(tokenizer), tokenizer, "here")
    cotraining = CoTraining(verifier, VerifierSection("here", learn_every=1, learning_rate=1e-3))
    with torch.no_grad():
        for parameter in verifier.model.parameters():
            parameter += 1e-4 * distributed.rank() * torch.randn_like(parameter)
    before = verifier.digest()
    answers = [
        Utterance(n, "ann", "ann", 0, 0, [], text, grade=Grade(text, right, ""))
        for n, (text, right) in enumerate([("4", True), ("7", False)])
    ]
    logged = [cotraining.after_update(n, [Dialogue(Example("a", "2+2=", "4"), answers)], Arithmetic()) for n in (1, 2)]
    return {"before": before, "after": verifier.digest(), "logged": logged, "left": len(cotraining.pairs)}


def main() -> None:
    torch.set_num_threads(1)
    invariants.MOST_GAP = {False: float("inf"), True: float("inf")}  # the server makes its log-probabilities up
    PartialState(cpu=True)
    folder = Path(sys.argv[1])
    found = {"rollouts": rollouts(folder), "verifiers": verifiers()}
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
