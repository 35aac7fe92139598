"""Updates whose layout of rows is plain: one row after another."""

import torch

from trl_ext import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy


class Plain:
    """Stands in for accelerate: one process, full precision."""

    device = torch.device("cpu")
    mixed_precision = "no"


def learner_of(model, tokenizer, folder, critic="head", **options):
    defaults = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "temperature": 1.0, "max_grad_norm": 0}
    args = PPOv2Config(**{**defaults, "per_device_train_batch_size": 16, **options})
    torch.manual_seed(5)
    learner = Learner(Policy("policy", model, tokenizer), args, critic=critic, outputs=3)
    learner.prepare(Plain(), updates=1)
    if learner.value_head is not None:
        torch.nn.init.normal_(learner.value_head.linear.weight)
    return learner
