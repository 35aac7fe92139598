"""A policy: a causal language model, or one adapter of a base that policies share, with its tokenizer and its reference
of the KL penalty."""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from trl_ext.chat.encoding import Tokenizer
from trl_ext.errors import one_line, retold
from trl_ext.files.manifest import CheckpointError
from trl_ext.files.paths import below
from trl_ext.models.adapters import (
    AdapterError,
    adapter_parameters,
    changes_base,
    copy_adapter,
    shared_parameters,
)
from trl_ext.models.forward import base_of
from trl_ext.models.weights import WeightsError, check_fit, load_adapter_weights, read_model
from trl_ext.process import distributed
from trl_ext.sharding.shards import SHARDS, Shards, load_model

SHARDED_POLICY = "models.policy."
"""What the names of a policy's own parameters begin with in shards."""


class Policy:
    """The weights that speak: a causal language model, or one adapter of a base that several policies share.

    Args:
        name: the policy's name in metrics, errors and folders.
        model: the model, or the ``PeftModel``.
        tokenizer: the policy's tokenizer.
        adapter: the policy's adapter of ``model``. It is needed if several adapters are active.

    Raises:
        AdapterError: several adapters are active, and none is named.
    """

    def __init__(self, name: str, model: PreTrainedModel | PeftModel, tokenizer: Tokenizer, adapter: str | None = None):
        self.name, self.tokenizer = name, tokenizer
        self.model: Any = model
        self.adapter: Any = None
        if isinstance(model, PeftModel):
            if adapter is None and len(model.active_adapters) > 1:
                raise AdapterError(
                    f"policy {name!r}: several adapters are active, {', '.join(map(repr, model.active_adapters))}, and "
                    "one is trained; name it (model_adapter_name, Agent(adapter=...)), or call set_adapter with one"
                )
            self.adapter = adapter or model.active_adapter
        self.reference: nn.Module | None = None
        """The reference of the KL penalty, if it is a model of its own."""
        self.ref_adapter: str | None = None
        """The adapter that is the reference. Without both, the base with its adapters off is."""
        self._frozen: list[nn.Parameter] = []
        self._trained: Sequence[nn.Parameter] = ()

    # -- which adapter is on --------------------------------------------------------------------------------------

    @contextmanager
    def active(self, adapter: str | None = None) -> Iterator[Any]:
        """Yield the Hugging Face model with this policy's adapter, or another ``adapter``, switched on."""
        wanted = adapter or self.adapter
        if wanted is not None and self.model.active_adapters != [wanted]:
            self.model.set_adapter(wanted)
            for parameter in self._frozen:
                parameter.requires_grad_(False)
            # set_adapter turns off gradients of other adapters, but the critic's learns in the same backward pass
            self.let_learn(self._trained)
        yield base_of(self.model)

    @contextmanager
    def without_adapter(self) -> Iterator[Any]:
        """Yield the Hugging Face model with all adapters switched off."""
        with self.model.disable_adapter():
            yield base_of(self.model)

    def keep_frozen(self) -> None:
        """Remember what is frozen of the adapter, which PEFT would let learn again when it is switched on."""
        if self.adapter is not None and self.adapter in self.model.peft_config:
            parts = list(adapter_parameters(self.model, self.adapter).values())
            if any(p.requires_grad for p in parts):
                self._frozen = [p for p in parts if not p.requires_grad]

    def freeze(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep ``parameters`` of an adapter as they are, now and whenever it is switched on."""
        self._frozen += parameters
        for parameter in parameters:
            parameter.requires_grad_(False)

    def let_learn(self, trained: Sequence[nn.Parameter]) -> None:
        """Turn on gradients for all ``trained`` parameters, whichever adapter is active, now and whenever one is."""
        self._trained = trained
        for parameter in trained:
            parameter.requires_grad_(True)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the policy, whether they learn or not."""
        if self.adapter is None:
            return dict(self.model.named_parameters())
        return adapter_parameters(self.model, self.adapter)

    # -- the reference --------------------------------------------------------------------------------------------

    def refer_to(self, reference: nn.Module | None, ref_adapter: str | None, needed: bool) -> None:
        """Choose the reference: the model ``reference``, or the adapter ``ref_adapter``, or the present weights.

        Without the first two, the base with its adapters off serves if it has the weights before training. Otherwise
        the model or the adapter is copied if a reference is ``needed``.

        Raises:
            ValueError: ``reference`` is the policy itself, or the model cannot be copied.
        """
        if reference is None and ref_adapter is None and needed:
            if self.adapter is None or shared_parameters(self.model, self.adapter):
                with self.active():
                    reference = self.copied_model()
            elif changes_base(self.model.peft_config[self.adapter]):
                ref_adapter = _start_of(self.model, self.adapter)
        if reference is not None:
            if reference is self.model:
                raise ValueError(f"policy {self.name!r}: the reference is the policy itself; pass a copy, or None")
            reference.requires_grad_(False).eval()
        self.reference, self.ref_adapter = reference, ref_adapter

    def copied_model(self) -> Any:
        """Return a copy of the model.

        Raises:
            ValueError: torch cannot copy it.
        """
        try:
            return copy.deepcopy(self.model)
        except RuntimeError as error:  # torch copies no tensor that another one was computed from, as PEFT ties some
            raise ValueError(
                f"policy {self.name!r}: its model cannot be copied ({one_line(error, 100)}); use critic 'head' and "
                "kl_coef 0, or pass value_model= and ref_model="
            ) from error

    @contextmanager
    def reference_model(self) -> Iterator[Any]:
        """Yield the reference model: a frozen copy, another adapter, or the base with its adapters off.

        Raises:
            ValueError: the policy has no reference, because all its weights train and ``kl_coef`` is 0.
        """
        if self.reference is not None:
            yield base_of(self.reference)
        elif self.ref_adapter is not None:
            with self.active(self.ref_adapter) as model:
                yield model
        elif isinstance(self.model, PeftModel):
            with self.without_adapter() as model:
                yield model
        else:
            raise ValueError(f"policy {self.name!r}: no reference is kept at kl_coef 0; set it above, or train a LoRA")

    # -- its folder -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save the model, or the adapter, together with the tokenizer. Plain ``from_pretrained`` loads the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self.model, self.adapter, folder)
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the weights that :meth:`save` wrote, or a checkpoint in shards.

        Raises:
            CheckpointError: the weights cannot be read, or they are not exactly those of the policy.
        """
        load_weights(self.model, self.adapter, folder)


def starting_point(model: Any, adapter: str) -> str | None:
    """Return the name of a frozen copy of ``adapter`` that serves as the reference, or None if no copy is needed.

    A new LoRA has B matrices of 0 and does not change the model. The model with its adapters off is then the reference.
    Any other adapter changes the model, or may, so its present weights are copied to another adapter. An adapter that
    trains biases of its base cannot be copied, and :meth:`Policy.refer_to` copies the whole model.
    """
    if shared_parameters(model, adapter) or _changes_nothing(model, adapter):
        return None
    return _start_of(model, adapter)


def _changes_nothing(model: Any, adapter: str) -> bool:
    """Return whether an adapter is a LoRA of matrices whose products are all 0."""
    config, weights = model.peft_config[adapter], adapter_parameters(model, adapter)
    # the half that begins with 0: B of linear layers, A of embeddings
    products = {name: w for name, w in weights.items() if ".lora_B" in name or ".lora_embedding_A" in name}
    others = [n for n in weights.keys() - products.keys() if ".lora_A" not in n and ".lora_embedding_B" not in n]
    kind = type(config) is LoraConfig and not config.use_dora and not changes_base(config)
    return kind and not others and all(not bool(w.any()) for w in products.values())


def _start_of(model: Any, adapter: str) -> str:
    copy_adapter(model, adapter, name := f"{adapter}_start")
    return name


# -- weights in a folder ------------------------------------------------------------------------------------------


def save_weights(model: Any, adapter: Any, folder: Path) -> None:
    """Save a model, or one ``adapter`` of a ``PeftModel``, directly in ``folder``, whatever the adapter's name."""
    if not isinstance(model, PeftModel):
        save_model(model, folder)
        return
    # PEFT saves every adapter that is not called "default" in a subfolder of its name
    nested, options = below(folder, adapter), model.peft_config[adapter]
    if options.base_model_name_or_path and os.path.isdir(options.base_model_name_or_path):
        options.base_model_name_or_path = os.path.abspath(options.base_model_name_or_path)  # it is read from elsewhere
    model.save_pretrained(str(folder), selected_adapters=[adapter])
    if nested.is_dir():
        for path in nested.iterdir():
            os.replace(path, folder / path.name)
        nested.rmdir()


def try_saving(who: str, model: Any, adapter: str | None = None, tokenizer: Any = None) -> None:
    """Save everything of a model, or of an adapter of it, but its weights, to see that it can be saved.

    Raises:
        ValueError: it cannot. A run would find out at its first checkpoint. ``who`` says in the message what it is.
    """
    with TemporaryDirectory() as folder:
        try:
            if isinstance(model, PeftModel):
                model.peft_config[adapter or model.active_adapter].save_pretrained(folder)
            elif isinstance(model, PreTrainedModel):
                save_model(model, Path(folder), {})
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except Exception as error:  # of transformers, of a tokenizer, of code that came with a model
            raise ValueError(
                f"{who} cannot be saved, so the first checkpoint would fail: {one_line(error, 300)}; correct its "
                "config or its generation_config before training"
            ) from error


def save_model(model: Any, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
    """Save a model, with the tensors in ``state`` in place of its own, without the progress bar of transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        if shown:
            logging.enable_progress_bar()


def load_weights(model: Any, adapter: Any, folder: Path) -> None:
    """Load weights that :func:`save_weights` wrote into a model, or into one of its adapters.

    Raises:
        CheckpointError: the weights cannot be read, or they are not exactly those of the model or of the adapter.
    """
    if (folder / SHARDS).is_dir():
        load_model(model, Shards(folder / SHARDS), SHARDED_POLICY)
        return
    with retold(WeightsError, lambda error: CheckpointError(str(error)), cause=True):
        if isinstance(model, PeftModel):
            load_adapter_weights(model, adapter, folder)
            return
        # by its own configuration: without a config.json, a model of the default size would be built, perhaps of 7B
        loaded = read_model(type(model), folder, config=copy.deepcopy(model.config), dtype=model.dtype)
        check_fit(model.state_dict(), loaded.state_dict(), folder)
    model.load_state_dict(loaded.state_dict())


def load_everywhere(model: Any, adapter: Any, folder: Path) -> None:
    """Load weights into the model of every process. Only the main process reads a whole model, and sends it."""
    if isinstance(model, PeftModel):
        load_weights(model, adapter, folder)
        return
    distributed.on_main(lambda: load_weights(model, adapter, folder))
    distributed.broadcast_weights(model.state_dict().values())
