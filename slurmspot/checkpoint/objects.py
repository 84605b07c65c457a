"""Registered objects: how each kind gives its state, and takes one.

Modules are unwrapped (DDP, ``torch.compile``), so that a wrapped and a plain model have the same
state. Optimizers are keyed by the names of their parameters instead of numbers. Everything else
has ``state_dict`` and ``load_state_dict`` and is taken at its word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from slurmspot.checkpoint import host, tagged
from slurmspot.checkpoint.random_state import RandomState, unmoved
from slurmspot.checkpoint.state import take
from slurmspot.errors import MismatchedCheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint tells of one tensor: it stands for the tensor until that is loaded."""

    path: str
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{host.dtype_name(self.dtype)} {list(self.shape)}"


class Part:
    """One registered object; this class serves whatever has the two methods.

    Attributes:
        keeps: whether the object may keep the very tensors it is given.
    """

    keeps = True

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state(self) -> Any:
        """Its state; tensors in it are live.

        Whatever it draws to tell its state, as loaders do, training draws the same numbers after.
        """
        with unmoved():
            return self.thing.state_dict()

    def load(self, state: Any) -> None:
        """Take ``state``, whose tensors are on the host and the object's to keep."""
        self.thing.load_state_dict(state)

    def templates(self, name: str, saved: Any) -> dict[str, torch.Tensor]:
        """Host memory to load each tensor of ``saved`` into, by path.

        Raises:
            MismatchedCheckpointError: ``saved`` is the state of some other object.
        """
        live = take(name, self.state()).tensors if dist.is_initialized() else {}
        return {one.path: _room(one, live.get(one.path)) for one in walk(saved)}

    def loose(self, name: str) -> set[str]:
        """Paths of tensors that replicas may disagree about: the first rank's count."""
        del name
        return set()

    def moved_by_step(self) -> set[tuple[int, int]]:
        """Where tensors lie that nothing but its step changes; see :func:`host.address`."""
        return set()

    def before_step(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have ``call`` called before each step, if it has steps; undone by what is returned."""
        del call
        return _nothing

    def extras(self) -> dict[str, torch.Tensor | None]:
        """What training changes besides the state: copies, on the host."""
        return {}

    def put_back_extras(self, extras: Mapping[str, torch.Tensor | None]) -> None:
        """Undo the changes since :meth:`extras`."""


class ModulePart(Part):
    """A model: its state must match the checkpoint's exactly."""

    keeps = False

    def __init__(self, name: str, module: nn.Module) -> None:
        """Refuses a module that has no shapes yet, such as ``torch.nn.LazyLinear``."""
        super().__init__(module)
        self.module = unwrapped(module)
        for key, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(
                    f"{tagged.join(name, key)} has no shape yet, so it can be neither saved nor "
                    "restored",
                    why="a lazy module learns its shapes in its first forward",
                    fix="run one batch through the model before it is registered",
                )

    def state(self) -> Any:
        """Parameters and persistent buffers by name."""
        return dict(self.module.state_dict())

    def load(self, state: Any) -> None:
        """Copy into parameters and buffers in place."""
        whole = self.module.state_dict()  # it carries the version of each part's format
        whole.update(state)
        self.module.load_state_dict(whole)

    def templates(self, name: str, saved: Any) -> dict[str, torch.Tensor]:
        """Like the live tensors, which must be those that were saved."""
        live = take(name, self.state()).tensors
        stored = {one.path: one for one in walk(saved)}
        for path, tensor in live.items():
            check_same(path, stored.get(path), tensor)
        for path, one in stored.items():
            if path not in live:
                raise mismatch(path, str(one), "no such tensor")
        return {path: host.empty_like(tensor) for path, tensor in live.items()}

    def loose(self, name: str) -> set[str]:
        """Buffers: one copy is kept, the first rank's, as DDP does at every forward pass."""
        return {tagged.join(name, key) for key, _ in self.module.named_buffers()}

    def extras(self) -> dict[str, torch.Tensor | None]:
        """Gradients, and buffers that are not part of the state."""
        return {
            name: None if tensor is None else host.copy(tensor) for name, tensor in self._extras()
        }

    def put_back_extras(self, extras: Mapping[str, torch.Tensor | None]) -> None:
        """Gradients that did not exist are dropped again."""
        parameters = dict(self.module.named_parameters())
        for name, live in list(self._extras()):
            held = extras.get(name)
            if live is not None and held is not None:
                live.detach().copy_(held)
            elif (parameter := parameters.get(name)) is not None:
                parameter.grad = None if held is None else held.to(parameter.device)

    def _extras(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.grad
        saved = self.module.state_dict().keys()
        yield from ((name, one) for name, one in self.module.named_buffers() if name not in saved)


class OptimizerPart(Part):
    """An optimizer, keyed by the names of its parameters."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """``names`` maps id(parameter) to its name; others go by their number."""
        super().__init__(optimizer)
        self.optimizer = optimizer
        self._names = names

    def state(self) -> Any:
        """``state_dict()`` with names in place of numbers."""
        raw = self.optimizer.state_dict()
        names = dict(enumerate(self._parameters()))
        return {
            **raw,
            "state": {names.get(key, key): value for key, value in raw["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]}
                for group in raw["param_groups"]
            ],
        }

    def load(self, state: Any) -> None:
        """``load_state_dict()``, keeping each state tensor's own type."""
        parameters = self._parameters()
        numbers = {name: i for i, name in enumerate(parameters)}
        raw = {
            **state,
            "state": {numbers.get(key, key): value for key, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in state["param_groups"]
            ],
        }
        self.optimizer.load_state_dict(raw)
        # torch casts state to the parameter's type, which loses bits of float32 moments of
        # bfloat16 parameters.
        for name in state["state"].keys() & parameters.keys():
            live = self.optimizer.state[parameters[name]]
            for key, value in state["state"][name].items():
                if isinstance(value, torch.Tensor) and value.dtype != live[key].dtype:
                    live[key] = value.to(live[key].device)

    def templates(self, name: str, saved: Any) -> dict[str, torch.Tensor]:
        """State tensors shaped like their parameter are sharded like it as well."""
        self._check_groups(name, saved["param_groups"])
        parameters = self._parameters()
        found = {}
        for key, values in saved["state"].items():
            parameter = parameters.get(key)
            live = self.optimizer.state.get(parameter, {}) if parameter is not None else {}
            for field, value in (values if isinstance(values, dict) else {"": values}).items():
                known = live.get(field)
                for one in walk(value):
                    if isinstance(known, torch.Tensor):
                        check_same(one.path, one, known)
                    found[one.path] = _room(one, parameter)
        rest = {key: value for key, value in saved.items() if key != "state"}
        return found | {one.path: host.empty(one.shape, one.dtype) for one in walk(rest)}

    def moved_by_step(self) -> set[tuple[int, int]]:
        """Its parameters and its state.

        Nothing if its steps may pass by the hooks: a captured graph replays a step without them,
        and a wrapper around an optimizer has a step of its own.
        """
        groups = self.optimizer.param_groups
        if not _is_hooked(self.optimizer) or any(group.get("capturable") for group in groups):
            return set()
        parameters = (p for group in groups for p in group["params"])
        states = self.optimizer.state.values()
        fields = (one for state in states if isinstance(state, dict) for one in state.values())
        tensors = (one for one in (*parameters, *fields) if isinstance(one, torch.Tensor))
        return {host.address(host.part(tensor)) for tensor in tensors}

    def before_step(self, call: Callable[[], None]) -> Callable[[], None]:
        """A step pre-hook."""
        if not _is_hooked(self.optimizer):
            return _nothing
        hook = self.optimizer.register_step_pre_hook(lambda *_: call())
        return hook.remove

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Name to parameter, in the order of the optimizer's own numbering."""
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return {self._names.get(id(p), f"#{i}"): p for i, p in enumerate(every)}

    def _check_groups(self, name: str, saved: list[dict[str, Any]]) -> None:
        live = self.state()["param_groups"]
        if len(saved) != len(live):
            raise mismatch(f"{name}/param_groups", f"{len(saved)} groups", f"{len(live)} groups")
        for i, (theirs, ours) in enumerate(zip(saved, live, strict=True)):
            where = f"{name}/param_groups/{i}"
            if theirs["params"] != ours["params"]:
                other = set(theirs["params"]) ^ set(ours["params"])
                raise mismatch(
                    f"{where}/params",
                    f"{len(theirs['params'])} parameters",
                    f"{len(ours['params'])} parameters",
                    why=f"first that differs: {min(other)}" if other else "the order differs",
                )
            if theirs.keys() != ours.keys():
                raise mismatch(
                    where,
                    f"with options {sorted(theirs.keys() - ours.keys())}",
                    f"options {sorted(ours.keys() - theirs.keys())} instead",
                )


def parts(objects: Mapping[str, Any]) -> dict[str, Part]:
    """How to handle each of ``objects``.

    Raises:
        UsageError: one has neither ``state_dict`` nor ``load_state_dict``, or a bad name.
    """
    names = {
        id(parameter): f"{name}.{path}"
        for name, thing in objects.items()
        if isinstance(thing, nn.Module)
        for path, parameter in unwrapped(thing).named_parameters()
    }
    # Random states come last wherever all parts are loaded: nothing may move them on afterwards.
    order = sorted(objects, key=lambda name: isinstance(objects[name], RandomState))
    return {name: _part(name, objects[name], names) for name in order}


def _part(name: str, thing: Any, names: Mapping[int, str]) -> Part:
    if not name or "/" in name:
        raise UsageError(f"{name!r} cannot name a registered object", fix="use a plain word")
    if isinstance(thing, nn.Module):
        return ModulePart(name, thing)
    if isinstance(thing, Optimizer):
        return OptimizerPart(thing, names)
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise UsageError(
            f"{name} cannot be checkpointed",
            why=f"{type(thing).__name__} has no state_dict() and load_state_dict()",
            fix="give it both, or do not register it",
        )
    return Part(thing)


def _room(saved: Saved, model: torch.Tensor | None) -> torch.Tensor:
    """Memory to load a tensor into, sharded like ``model`` if that is of its shape."""
    if isinstance(model, DTensor) and model.shape == saved.shape:
        return host.empty_like(model, saved.dtype)
    return host.empty(saved.shape, saved.dtype)


def _nothing() -> None:
    pass


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether its steps run the step pre-hooks, as those of torch's own optimizers do."""
    return getattr(type(optimizer).step, "hooked", False)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile`` wrappers."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def walk(value: Any) -> Iterator[Saved]:
    """Every saved tensor in a nested state."""
    if isinstance(value, Saved):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        for item in value:
            yield from walk(item)


def check_same(path: str, saved: Saved | None, live: torch.Tensor) -> None:
    """Refuse to load ``saved`` into a tensor of another type or shape.

    Raises:
        MismatchedCheckpointError: they differ.
    """
    expected = Saved(path, live.dtype, live.shape)
    if saved != expected:
        raise mismatch(path, str(saved or "no such tensor"), str(expected))


def mismatch(
    path: str, saved: str, expected: str, *, why: str | None = None
) -> MismatchedCheckpointError:
    """The error for a checkpoint of something else."""
    return MismatchedCheckpointError(
        f"the checkpoint is of another state: {path}",
        why=why or f"saved {saved}, expected {expected}",
        fix="restore with the code and settings that saved it, or use a new run folder",
    )
