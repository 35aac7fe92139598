"""Configurations with schedules, and one update of them."""

from maporl.validation.load import from_dict

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+= :;?abp_XO/JQK|"}


def config(folder, **changes):
    base = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum", "largest": 9},
        "agent_defaults": {"tiny": TINY},
        "agents": {"ann": {}, "bob": {}},
        "protocol": {"name": "debate", "turns": 1},
        "updates": 3,
        "ppo": {"response_length": 3, "num_ppo_epochs": 1, "temperature": 1.0, "missing_eos_penalty": 1.0},
        "training": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "use_cpu": True,
            "learning_rate": 1e-2,
        },
        "evaluation": {"questions": 0},
        "seed": 3,
    }
    return from_dict({**base, **changes})


def one_update(trainer):
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.dialogues
    rows = trainer.advantage(batch).token_batches
    metrics = trainer.update(batch).metrics
    trainer.state.global_step += 1
    trainer.episodes += trainer.args.local_batch_size
    return answers, rows, metrics
