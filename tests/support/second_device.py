"""A second device for tests on machines without an accelerator.

``sim`` computes on the CPU. Its tensors wrap CPU tensors and do not mix with them: an operation that would fail on CUDA
because a tensor was left behind fails here, too. It also counts what would stop the host until the device is done.

It has one index, ``sim:0``, because autograd knows no more devices of a backend in Python. It does not show races,
kernels, limits of memory, or speed.
"""

import collections
import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration

AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this version of torch takes a backend that is written in Python."""
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
SCALARS = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, *INDEXING}
"""Operations that take a CPU tensor without dimensions, as pointwise ones do."""
WAITS = {
    aten._local_scalar_dense.default: 1, aten.nonzero.default: 1, aten.masked_select.default: 1, aten.equal.default: 1,
    aten.multinomial.default: 2, aten._unique2.default: 1, aten.unique_dim.default: 1, aten.bincount.default: 2,
    aten.unique_consecutive.default: 1,
}  # fmt: skip
"""How often CUDA's kernels of these operations stop the host."""


class _State:
    """``here`` says whether the device is there; ``generators`` are by index; ``waits`` are listeners."""

    here = False
    count = 1
    generators = collections.defaultdict(torch.Generator)
    listeners: list[collections.Counter] = []


def _waited(kind, times=1):
    if not _State.listeners:
        return
    frame, place = sys._getframe(2), "backward"
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and name != __file__:
            place = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            break
        frame = frame.f_back
    for listener in _State.listeners:
        listener[f"{kind} at {place}"] += times


class SimTensor(torch.Tensor):
    """A tensor on ``sim``. ``inner`` holds its numbers."""

    @staticmethod
    def __new__(cls, inner):
        # fmt: off
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device="sim:0",
        )
        # fmt: on
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def __tensor_flatten__(self):
        """What makes ``Module.to`` swap a new tensor into its parameter. A parameter that is here already stays."""
        if isinstance(self, torch.nn.Parameter):
            raise AttributeError
        return lambda: (["inner"], None)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return SimTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __deepcopy__(self, memo):
        made = SimTensor(self.inner.detach().clone())
        made = torch.nn.Parameter(made) if isinstance(self, torch.nn.Parameter) else made
        memo[id(self)] = made
        return made.requires_grad_(self.requires_grad)

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def storage(self):
        return self.inner.storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    def as_subclass(self, kind):
        return self  # a mask of blocks is then an ordinary mask, which is right too

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def __array__(self, dtype=None):
        return self.numpy()

    def __repr__(self):
        return f"sim({self.inner})"


def _compute(function, args, kwargs):
    """Compute a function of CPU and sim tensors on the CPU, and give the result to the device on which it would be."""
    if function is aten._fused_sdp_choice.default:
        return 0  # no kernel but the composite one
    opened, strangers = {}, []

    def open_(value, in_list=False):
        if isinstance(value, SimTensor):
            opened[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.Tensor):
            strangers.append((value, in_list))
        elif isinstance(value, list | tuple):
            return type(value)([open_(item, True) for item in value])
        return value

    plain = [open_(arg) for arg in args]
    named = {key: open_(value) for key, value in kwargs.items()}
    if opened and strangers and function not in COPIES:
        _check_devices(function, args, strangers)
    _count(function, args, named, opened)
    target = named.get("device")
    to_cpu = target is not None and torch.device(target).type == "cpu"
    if target is not None:
        named["device"] = "cpu"
    if torch.Tag.nondeterministic_seeded in function.tags and opened and named.get("generator") is None:
        names = {argument.name for argument in function._schema.arguments}
        if "generator" in names:
            named["generator"] = generator()
    found = function(*plain, **named)
    if to_cpu or (not opened and target is None):
        return found

    def close(value):
        if isinstance(value, torch.Tensor):
            known = opened.get(id(value))
            if known is None:
                return SimTensor(value)
            if known.shape != value.shape:
                raise NotImplementedError(f"sim: {function} resizes its argument")
            return known
        return type(value)([close(item) for item in value]) if isinstance(value, list | tuple) else value

    if isinstance(args[0] if args else None, torch.Tensor) and found is args[0]:
        return found  # a CPU tensor that was written to
    return close(found)


def _check_devices(function, args, strangers):
    """Raise what CUDA raises for operations that mix its tensors with the CPU's."""
    pointwise = torch.Tag.pointwise in function.tags or function in SCALARS
    foreach = function._schema.name.startswith("aten::_foreach")
    for tensor, in_list in strangers:
        if tensor.dim() == 0 and (foreach or (pointwise and not in_list)):
            continue
        if function in INDEXING and in_list and isinstance(args[0], SimTensor):
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, sim:0 and "
            f"{tensor.device}! (in {function})"
        )


def _count(function, args, named, opened):
    if not opened:
        return
    if function in COPIES:
        to_cpu = function is aten.copy_.default and not isinstance(args[0], SimTensor)
        to_cpu |= named.get("device") is not None and torch.device(named["device"]).type == "cpu"
        if to_cpu and not named.get("non_blocking") and not (len(args) > 2 and args[2] is True):
            _waited("copy to the CPU")
    elif function in WAITS:
        _waited(function._schema.name, WAITS[function])
    elif function in INDEXING:
        masks = sum(isinstance(i, SimTensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        filled = function is not aten.index.Tensor and args[2].numel() == 1  # this is masked_fill, which does not wait
        if masks and not filled:
            _waited("reading or writing by a mask", masks)
    elif function is aten.repeat_interleave.Tensor and named.get("output_size") is None:
        _waited("repeat_interleave without output_size")


@contextmanager
def waits():
    """Yield a counter of the places where the host waited for the device."""
    found = collections.Counter()
    _State.listeners.append(found)
    try:
        yield found
    finally:
        _State.listeners = [listener for listener in _State.listeners if listener is not found]


def generator(index=0):
    return _State.generators[index]


class _Module:
    """``torch.sim``, with the functions that libraries ask a device's module for."""

    def is_available(self):
        return _State.here

    is_initialized = is_available

    def device_count(self):
        return _State.count if _State.here else 0

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    _lazy_init = synchronize = empty_cache = lambda self, *_: None

    def _is_in_bad_fork(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def is_bf16_supported(self, including_emulation=True):
        return True

    def manual_seed(self, seed):
        generator().manual_seed(seed)

    def manual_seed_all(self, seed):
        for index in range(_State.count):
            generator(index).manual_seed(seed)

    def get_rng_state(self, device=0):
        return generator(torch.device("sim", 0).index if device == "sim" else torch.device(device).index).get_state()

    def set_rng_state(self, state, device=0):
        generator(0 if device == "sim" else torch.device(device).index).set_state(state)


def _made(kind):
    """Return a kernel that makes a tensor on the CPU and gives it to the device."""

    def make(*args, device=None, pin_memory=None, layout=None, **kwargs):
        return SimTensor(kind(*args, **kwargs))

    return make


def _copy_from(source, target, non_blocking=False):
    """Copy between devices, as ``torch.tensor(numbers, device="sim")`` does below the dispatch in Python."""
    inner, other = (t.inner if isinstance(t, SimTensor) else t for t in (target, source))
    inner.copy_(other)
    if inner is target:
        _waited("copy to the CPU")
    return target


def _in_bfloat16(function):
    """Return a kernel of mixed precision: ``function`` with its float32 tensors as bfloat16."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def narrow(value):
        wide = isinstance(value, SimTensor) and value.dtype == torch.float32
        return value.to(torch.bfloat16) if wide else value

    def compute(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(below):
            return function(*map(narrow, args), **{key: narrow(value) for key, value in kwargs.items()})

    return compute


_LIBRARIES = []


def _register():
    """Make torch know the device. It stays known, and :func:`second_device` says when it is there."""
    if _LIBRARIES:
        return

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self):
            return _State.here

    backend_registration._setup_privateuseone_for_python_backend(rename="sim", backend_module=_Module(), hook=Hook())
    kernels, fallback = Library("aten", "IMPL"), Library("_", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "randperm"):
        packet, _, overload = name.partition(".")
        kernels.impl(name, _made(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention"):
        kernels.impl(name, _in_bfloat16(getattr(aten, name).default), "AutocastPrivateUse1")
    fallback.fallback(fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((kernels, fallback))


@contextmanager
def second_device(count=1):
    """Make ``sim`` the accelerator of torch, accelerate and transformers. ``count``: how many there seem to be."""
    _register()
    begin = PartialState.__init__

    def choose(self, cpu=False, **options):
        """Choose the device as accelerate does on a machine with CUDA, which it takes unless it is asked for the
        CPU."""
        with patch.dict(os.environ):
            if cpu:
                os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
            begin(self, cpu, **options)

    AcceleratorState._reset_state(True)
    _State.here, _State.count = True, count
    torch.manual_seed(0)
    try:
        with (
            patch.object(PartialState, "__init__", choose),
            patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="sim"),
            patch.object(
                torch.accelerator, "synchronize", _Module().synchronize
            ),  # torch knows none for such a backend
        ):
            yield torch.device("sim", 0)
    finally:
        leave()


def leave():
    """Let the device disappear, as on a machine without one."""
    _State.here = False
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    AcceleratorState._reset_state(True)
