"""What belongs to a PEFT adapter, from PEFT's own layers and options, and not from how its parameters are called.

Every place that trains, copies, sends, counts or saves an adapter asks here. An adapter is the entries under its name
in the containers of tuner layers and of modules that PEFT trains whole. Its biases, if it trains any, are parameters of
the base.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftMixedModel, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from trl_ext.errors import UserError, one_line
from trl_ext.models.randomness import evaluating
from trl_ext.process.random_states import forked_rng

HALF_PRECISION = (torch.bfloat16, torch.float16)

KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""The values of ``LoraConfig.init_lora_weights`` that leave the base's weights as they are."""

READS_ITS_OWN = ("ADAPTION_PROMPT", "XLORA", "POLY", "CARTRIDGE", "SHADOW")
"""PEFT methods that work only through PEFT's own forward, with their own inputs, besides those that put tokens before a
prompt."""


class AdapterError(UserError, ValueError):
    """An adapter cannot be trained or copied as it is."""


def fault(config: PeftConfig) -> str | None:
    """Return why an adapter with these options cannot be used here, and what to use instead, or None if it can."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        return (
            f"{kind} puts virtual tokens before the prompt, which are neither read nor trained here; expected an "
            "adapter of the layers: use LoraConfig, or trainable_token_indices for tokens of a prompt that learn"
        )
    if kind in READS_ITS_OWN:
        return f"{kind} works only through PEFT's own forward, which is not called here; use LoraConfig"
    if getattr(config, "save_only_topk_weights", False):
        return "VBLoRAConfig(save_only_topk_weights=True) saves too little for a checkpoint to go on from; leave it out"
    for option in ("alora_invocation_tokens", "arrow_config"):
        if getattr(config, option, None) is not None:
            return (
                f"LoraConfig({option}=...) works only through PEFT's own forward, which is not called here; leave it "
                "out"
            )
    return None


def beyond_lora(base: Any) -> list[str]:
    """Return the names, with their parent's, of linear layers of a Hugging Face model that a LoRA cannot adapt.

    They are those of Mamba whose weights are read without calling the layers, so that a LoRA would do nothing (fused
    kernels read ``out_proj`` so, and PEFT refuses it in most such models), and layers that compute something else than
    a product, such as routers of experts, to whose output PEFT would add a product.
    """
    found = set()
    for name, module in base.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):
            parent = name.rpartition(".")[2]
            found |= {f"{parent}.{layer}" for layer in ("dt_proj", "out_proj") if hasattr(module, layer)}
        elif isinstance(module, nn.Linear) and not _is_product(module):
            found.add(".".join(name.split(".")[-2:]))
    return sorted(found)


@torch.no_grad()
def _is_product(layer: nn.Linear) -> bool:
    """Return whether a linear layer of transformers returns what its name says, by the shape of what it returns."""
    if not type(layer).__module__.startswith("transformers.models."):
        return True
    rows = torch.zeros(2, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    try:
        returned: Any = layer(rows)
    except (RuntimeError, ValueError):
        return False
    return isinstance(returned, Tensor) and returned.shape == (2, layer.out_features)


def fitted(options: PeftConfig, base: Any) -> PeftConfig:
    """Return the options of a new adapter of a Hugging Face model, of which ``all-linear`` leaves out what is
    :func:`beyond_lora`."""
    fitting: Any = copy.copy(options)
    if getattr(fitting, "target_modules", None) == "all-linear" and not fitting.exclude_modules:
        fitting.exclude_modules = beyond_lora(base) or None
    return fitting


def check_adapters(model: Any, where: str) -> None:
    """Check that the adapters of a model can be used here. Models without adapters pass.

    Raises:
        AdapterError: one cannot. The message begins with ``where`` and says what to use instead.
    """
    if isinstance(model, PeftMixedModel):
        raise AdapterError(f"{where}: mixed adapters are not supported; use get_peft_model without mixed=True")
    for name, config in model.peft_config.items() if isinstance(model, PeftModel) else ():
        if (why := fault(config)) is not None:
            raise AdapterError(f"{where}: its adapter {name!r} cannot be used: {why}")
    layers = _tuner_layers(model) if isinstance(model, PeftModel) else ()
    if any(getattr(layer, "merged", False) for layer in layers if isinstance(layer, BaseTunerLayer)):
        raise AdapterError(f"{where}: an adapter is merged into its base; call unmerge_adapter() first")


def check_company(model: Any, adapters: Sequence[str]) -> None:
    """Check that policies with these adapters of one base change nothing for each other.

    Raises:
        AdapterError: one of the adapters changes the base that the others share.
    """
    for name in adapters:
        others = ", ".join(repr(other) for other in adapters if other != name)
        if changes_base(model.peft_config[name]):
            why = f"its initialisation ({initialisation(model.peft_config[name])}) has changed the base"
        elif shared_parameters(model, name):
            why = f"it trains biases of the base (bias={model.peft_config[name].bias!r})"
        else:
            continue
        raise AdapterError(
            f"adapter {name!r} cannot share its base with {others}: {why}, and would change them too; load the model "
            "once more for it, or use a LoraConfig without this option"
        )
    for name in adapters:
        try:
            get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        except KeyError as error:  # a module that another adapter has trained tokens of
            raise AdapterError(
                f"adapter {name!r} could not be saved beside {', '.join(repr(n) for n in adapters if n != name)}: PEFT "
                f"asks for {error}, which only the other has; give both the same trainable_token_indices and "
                "modules_to_save, or a base each"
            ) from error


# -- what belongs to an adapter -----------------------------------------------------------------------------------


def adapter_parameters(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter by their names without the adapter's: those of its layers, and its biases.

    These are all that training it can change. Adapters with the same options have the same names.
    """
    parameters = {name: p for name, p, learns in _entries(model, adapter) if learns and isinstance(p, nn.Parameter)}
    return parameters | shared_parameters(model, adapter)


def adapter_state(model: Any, adapter: str) -> dict[str, Tensor]:
    """Return all tensors of an adapter: :func:`adapter_parameters`, and what goes with them but never learns."""
    return {name: tensor for name, tensor, _ in _entries(model, adapter)} | shared_parameters(model, adapter)


def shared_parameters(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    """Return the parameters of the base that an adapter trains (``bias="all"``, ``"lora_only"``, ...), by name.

    Switching the adapter off does not undo what they have learned.
    """
    bias = getattr(model.peft_config[adapter], "bias", "none")
    if not isinstance(bias, str) or bias == "none":
        return {}
    inside = {id(tensor) for name in model.peft_config for _, tensor, _ in _entries(model, name)}
    if bias.endswith("_only"):
        bases = [m.get_base_layer() for m in _tuner_layers(model) if isinstance(m, BaseTunerLayer) and _has(m, adapter)]
        chosen = {id(p) for base in bases if isinstance(p := getattr(base, "bias", None), nn.Parameter)}
        return {n: p for n, p in model.named_parameters() if id(p) in chosen - inside}
    return {n: p for n, p in model.named_parameters() if n.split(".")[-1] == "bias" and id(p) not in inside}


def narrow_adapters(model: Any, adapters: Iterable[str | None]) -> None:
    """Give ``adapters`` of a model the dtype of its half-precision base; on another base they stay as they are.

    Otherwise PEFT converts the activations at every layer to float32 and back. Small steps are not lost, because the
    optimizer steps float32 master weights.
    """
    names = [name for name in adapters if name is not None]
    if names and (dtype := _dtype_of_base(model)) in HALF_PRECISION:
        for name in names:
            _convert(model, name, dtype)


def narrow_as_saved(model: Any, adapter: str, saved: Iterable[Tensor]) -> None:
    """Give an adapter the dtype of its half-precision base if its ``saved`` tensors have that dtype.

    PEFT reads every adapter in float32. One that was trained here was measured in its base's dtype, and answers
    otherwise in float32.
    """
    dtypes = {tensor.dtype for tensor in saved if tensor.is_floating_point()}
    # the base is looked through only for what was saved in half precision: weights are also sent in every update
    if dtypes <= {*HALF_PRECISION} and dtypes == {_dtype_of_base(model)}:
        _convert(model, adapter, *dtypes)


def _convert(model: Any, adapter: str, dtype: torch.dtype) -> None:
    for tensor in adapter_state(model, adapter).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _dtype_of_base(model: Any) -> torch.dtype:
    return next(p.dtype for p in base_parameters(model).values() if p.is_floating_point())


def base_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to no adapter, by the names that they have in the model without PEFT."""
    return dict(_named_base(model, model.named_parameters()))


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name, as if PEFT had put no adapters into it."""
    return dict(_named_base(model, model.state_dict(keep_vars=True).items()))


def strays(model: Any) -> list[str]:
    """Return the names of parameters that require gradients, and that belong to no adapter of ``model``."""
    adapter_ids = {id(p) for name in model.peft_config for p in adapter_state(model, name).values()}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapter_ids]


def _tuner_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper))


def _containers(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries of a tuner layer, or of a module that is trained whole, that have adapters for keys."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleDict | nn.ParameterDict) or type(child).__name__ == "BufferDict":
            yield name, child


def _has(layer: Any, adapter: str) -> bool:
    return any(adapter in container for _, container in _containers(layer))


def _entries(model: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each tensor of an adapter once: its name without the adapter's, the tensor, and whether it can learn."""
    seen: set[int] = set()
    for path, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        learning = {name.split(".")[-1] for name in layer.adapter_layer_names} | {"modules_to_save"}
        for name, container in _containers(layer):
            if adapter not in container:
                continue
            held = container[adapter]
            tensors = [("", held)] if isinstance(held, Tensor) else list(_tensors(held))
            for inner, tensor in tensors:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join(filter(None, (path, name, inner))), tensor, name in learning


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _named_base(model: nn.Module, named: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of ``named`` that belong to no adapter, by the names that they have without PEFT."""
    inside = {
        f"{path}.{name}." if path else f"{name}."
        for path, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        for name, _ in _containers(layer)
    }
    wrappers = {path for path, layer in model.named_modules() if isinstance(layer, AuxiliaryTrainingWrapper)}
    for name, tensor in named:
        parts = name.split(".")
        places = {".".join(parts[:n]) + "." for n in range(1, len(parts))}
        if not places & inside:
            base_path = [
                part
                for n, part in enumerate(parts)
                if part not in ("base_layer", "original_module")
                and not (part == "token_adapter" and ".".join(parts[:n]) in wrappers)
            ]
            yield ".".join(base_path), tensor


# -- copies -------------------------------------------------------------------------------------------------------


def changes_base(config: PeftConfig) -> bool:
    """Return whether an adapter with these options has changed the weights of its base when it was made.

    PiSSA, OLoRA, CorDA and LoRA-GA subtract from them what the adapter begins with, LoftQ quantises them, and KaSA cuts
    small singular values off. The base with adapters off is then not the model that the adapter was made from.
    """
    return getattr(config, "init_lora_weights", True) not in KEEPS_BASE or _kasa(config)


def initialisation(config: Any) -> str:
    """Return the option of an adapter by which it has changed its base."""
    return "kasa_config" if _kasa(config) else f"init_lora_weights={config.init_lora_weights!r}"


def repeats(config: PeftConfig) -> bool:
    """Return whether an initialisation that changes the base changes it in the same way when the adapter is loaded
    again."""
    return not changes_base(config) or getattr(config, "init_lora_weights", True) in ("pissa", "olora")


def _kasa(config: Any) -> bool:
    """Return whether an adapter has cut small singular values off its base."""
    return getattr(config, "kasa_config", None) is not None


@contextmanager
def settled(model: Any, adapter: str) -> Iterator[None]:
    """Let an adapter's options say meanwhile that it leaves its base as it is, which it has changed already."""
    options = model.peft_config[adapter]
    before = getattr(options, "init_lora_weights", None)
    if changes_base(options):
        options.init_lora_weights = True
    try:
        yield
    finally:
        if before is not None:
            options.init_lora_weights = before


@contextmanager
def switches_restored(model: Any) -> Iterator[None]:
    """Make the adapters active again that are active now, and let the parameters require gradients that do now.

    PEFT changes both whenever it switches an adapter on.
    """
    active, learning = list(model.active_adapters), [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        model.set_adapter(active[0] if len(active) == 1 else active)
        for parameter, learns in learning:
            parameter.requires_grad_(learns)


def copy_adapter(model: Any, source: str, name: str, trainable: bool = False) -> None:
    """Add an adapter ``name`` with the weights that ``source`` has now, or give these to the copy that an earlier run
    has made.

    It is never initialised as ``source`` was, because that may change the base once more (:func:`changes_base`). The
    active adapter stays active, and what requires gradients still does.

    Raises:
        AdapterError: PEFT has no second adapter of this kind that computes the same, ``source`` trains parameters of
            the base, or an adapter of the user's has this name.
    """
    if name in model.peft_config and not hasattr(model.peft_config[name], COPIED):
        raise AdapterError(f"adapter {name!r}: the copy of {source!r} has this name; give the adapter another name")
    if shared_parameters(model, source):
        raise AdapterError(
            f"adapter {source!r} trains biases of its base (bias={model.peft_config[source].bias!r}), of which there "
            "can be no second copy in one model; set bias='none', or pass models of their own"
        )
    if _kasa(model.peft_config[source]):
        raise AdapterError(f"adapter {source!r}: a copy of KaSA would cut its base once more; {APART}")
    with switches_restored(model):
        try:
            if name not in model.peft_config:
                _add_like(model, source, name, trainable)
            set_state(model, name, adapter_state(model, source))
            _check_copy(model, source, name)
        except (
            AdapterError,
            AttributeError,
            KeyError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            if name in model.peft_config:
                model.delete_adapter(name)
            raise AdapterError(
                f"adapter {source!r}: PEFT has no second one of its kind that computes the same "
                f"({one_line(error, 200)}); {APART}"
            ) from error
    for parameter in adapter_parameters(model, name).values():
        parameter.requires_grad_(trainable and parameter.is_floating_point())


COPIED = "_copied_by_trl_ext"
"""The attribute of an adapter's options that says that it is a copy of this module's, which a later run may use again.
"""
APART = "set kl_coef to 0 or pass ref_model=, and take critic 'head', or use a plain LoraConfig"


def _add_like(model: Any, source: str, name: str, trainable: bool) -> None:
    """Add an adapter of the kind of ``source`` that leaves the base as it is."""
    options = copy.deepcopy(model.peft_config[source])
    plain = {"init_lora_weights": True, "bias": "none", "layer_replication": None}  # what the base has of them, it has
    for option, value in plain.items():
        if hasattr(options, option):
            setattr(options, option, value)
    setattr(options, COPIED, True)
    options.inference_mode = not trainable
    with forked_rng():
        model.add_adapter(name, options)
    leave_meta(model, name)
    state = adapter_state(model, source)
    for key, tensor in adapter_state(model, name).items():
        if key in state and tensor.shape != state[key].shape:  # OLoRA's are smaller in small layers
            tensor.data = tensor.data.new_empty(state[key].shape)


@torch.no_grad()
def _check_copy(model: Any, source: str, name: str) -> None:
    base = model.get_base_model()
    if next(base.parameters()).is_meta:
        return
    size, device = base.config.get_text_config().vocab_size, next(base.parameters()).device
    ids, outputs = torch.tensor([[1 % size, 2 % size, 3 % size]], device=device), []
    with evaluating(model):
        for adapter in (source, name):
            model.set_adapter(adapter)
            outputs.append(base(input_ids=ids)[0].float())
    if not torch.allclose(outputs[0], outputs[1], atol=1e-4, rtol=1e-2):
        raise AdapterError(f"with the same weights they differ by {float((outputs[0] - outputs[1]).abs().max()):.2g}")


def set_state(model: Any, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Give an adapter copies of the tensors of ``state``, by the names of :func:`adapter_state`, in their precision.

    Tensors that are elsewhere (on the meta device) are left out.

    Raises:
        AdapterError: the tensors are not those of this adapter.
    """
    old = adapter_state(model, adapter)
    wrong = sorted(old.keys() ^ state.keys()) or sorted(name for name in old if old[name].shape != state[name].shape)
    if wrong:
        raise AdapterError(f"adapter {adapter!r} cannot take over these weights: {wrong[0]!r} is not the same in both")
    for name, tensor in old.items():
        if not tensor.is_meta and not state[name].is_meta:
            tensor.data = state[name].detach().to(tensor.device, copy=True)


def leave_meta(model: PeftModel, adapter: str) -> None:
    """Put the tensors of an adapter that are on the meta device on the CPU.

    They are 0 until they are loaded or received.
    """
    meta = {id(t) for t in adapter_state(model, adapter).values() if t.is_meta}
    for module in model.modules() if meta else ():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for held in tables:
            for key, tensor in list(held.items()):
                if tensor is not None and id(tensor) in meta:
                    value = torch.zeros_like(tensor, device="cpu")
                    held[key] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


@contextmanager
def shaken(model: PeftModel, adapters: list[str], scale: float = 0.1) -> Iterator[None]:
    """Add noise to the parameters of ``adapters``, of which a new one changes nothing, and restore them exactly.

    With it, two ways to read a model can be compared before anything is trained.
    """
    parameters = {id(p): p for name in adapters for p in adapter_parameters(model, name).values()}
    generator = torch.Generator().manual_seed(0)
    before = {key: p.data for key, p in parameters.items()}
    try:
        for parameter in parameters.values():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
                parameter.data = parameter.data + scale * noise
        yield
    finally:
        for key, parameter in parameters.items():
            parameter.data = before[key]
