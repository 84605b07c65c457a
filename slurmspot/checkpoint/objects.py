"""Registered objects: how each kind gives its state, and takes one.

Modules are unwrapped (DDP, ``torch.compile``), so that a wrapped and a plain model have the same
state. Optimizers are keyed by the names of their parameters instead of numbers. Everything else
has ``state_dict`` and ``load_state_dict`` and is taken at its word.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
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

    def check_ties(self, name: str, rooms: Mapping[str, torch.Tensor]) -> None:
        """Refuse what was read into ``rooms`` if one live tensor would get two values.

        Raises:
            MismatchedCheckpointError: it would.
        """

    def loose(self, name: str) -> set[str]:
        """Paths of tensors that replicas may disagree about: the first rank's count."""
        del name
        return set()

    def moved_by_step(self) -> set[tuple[int, int]]:
        """Where tensors lie that nothing but its step changes; see :func:`host.address`."""
        return set()

    def strangers(self) -> int:
        """How many parameters it moves that are in no registered module, though there are some."""
        return 0

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

    def __init__(self, name: str, module: nn.Module, names: _Names) -> None:
        """Refuses a module that could not be restored.

        One that has no shapes yet, such as ``torch.nn.LazyLinear``, or that has expanded tensors.
        """
        super().__init__(module)
        self.module = unwrapped(module)
        self._names = names
        for key, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(
                    f"{tagged.join(name, key)} has no shape yet, so it can be neither saved nor "
                    "restored",
                    why="a lazy module learns its shapes in its first forward",
                    fix="run one batch through the model before it is registered",
                )
        for key, tensor in self.state().items():
            if isinstance(tensor, torch.Tensor) and _is_expanded(host.part(tensor)):
                raise UsageError(
                    f"{tagged.join(name, key)} could not be restored in place",
                    why="it is expanded: some of its elements are one and the same in memory",
                    fix="register a copy of it: what expand() gave, and then .contiguous()",
                )

    def state(self) -> Any:
        """Parameters and persistent buffers by name."""
        state = dict(self.module.state_dict())
        self._names.see(self.module, state.keys())
        return state

    def load(self, state: Any) -> None:
        """Copy into parameters and buffers in place."""
        whole = self.module.state_dict()  # it carries the version of each part's format
        whole.update(state)
        for key in filter(_is_extra, state):
            whole[key] = deepcopy(state[key])  # its module may keep it
        self.module.load_state_dict(whole)

    def templates(self, name: str, saved: Any) -> dict[str, torch.Tensor]:
        """Like the live tensors, which must be those that were saved.

        Extra state is as its module likes it, and so is the shape of some buffers.
        """
        state = self.state()
        extra = set(filter(_is_extra, state))
        for key in sorted(extra ^ set(filter(_is_extra, saved))):
            sides = ("no extra state", "some") if key in extra else ("extra state", "none")
            raise mismatch(tagged.join(name, key), *sides)
        live = take(name, _without(extra, state)).tensors
        stored = {one.path: one for one in walk(_without(extra, saved))}
        resized = self._resized(name)
        rooms = {}
        for path, tensor in live.items():
            one = stored.get(path)
            if one is not None and one.shape != tensor.shape and path in resized:
                rooms[path] = host.empty(one.shape, tensor.dtype)
            else:
                rooms[path] = host.empty_like(tensor)
            check_same(path, one, rooms[path])
        for path, one in stored.items():
            if path not in live:
                raise mismatch(path, str(one), "no such tensor")
        known = take(name, {key: state[key] for key in extra}).tensors
        found = walk({key: saved[key] for key in extra})
        return rooms | {one.path: _room(one, known.get(one.path)) for one in found}

    def check_ties(self, name: str, rooms: Mapping[str, torch.Tensor]) -> None:
        """Parameters may be tied here that were not when they were saved."""
        first: dict[Any, str] = {}
        live = take(name, self.state()).tensors
        for path in rooms:
            mine = host.part(live[path]) if path in live else None
            if mine is None or not mine.nbytes:
                continue
            twin = first.setdefault((host.address(mine), mine.dtype, mine.stride()), path)
            hashes = {host.content_hash(rooms[one]) for one in (path, twin) if path != twin}
            if len(hashes) > 1:
                raise mismatch(path, f"apart from {twin}", "one tensor")

    def _resized(self, name: str) -> set[str]:
        """Paths of the buffers that their module may give another shape when it loads.

        Those of quantization are empty, or of one value, until they have seen data.
        """
        return {
            tagged.join(name, key)
            for prefix, module in self.module.named_modules(remove_duplicate=False)
            if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001 - made to be overridden
            for key, buffer in module.named_buffers(prefix, recurse=False)
            if buffer.numel() <= 1
        }

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
            if live is not None and held is not None and _fits(live, held):
                live.detach().copy_(held)  # DDP keeps gradients in memory of its own
            elif (parameter := parameters.get(name)) is not None:
                parameter.grad = None if held is None else held.to(parameter.device)
            elif live is not None and held is not None:
                owner, _, key = name.rpartition(".")
                setattr(self.module.get_submodule(owner), key, held.to(live.device))

    def _extras(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.grad
        saved = self.module.state_dict().keys()
        yield from ((name, one) for name, one in self.module.named_buffers() if name not in saved)


class OptimizerPart(Part):
    """An optimizer, keyed by the names of its parameters."""

    def __init__(self, optimizer: Optimizer, names: _Names) -> None:
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
        """``load_state_dict()``, each state tensor of its own type, laid out like its parameter."""
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
            parameter = parameters[name]
            live = _retyped(self.optimizer.state[parameter], state["state"][name])
            self.optimizer.state[parameter] = _laid_out(live, parameter)

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

    def strangers(self) -> int:
        """Parameters that a checkpoint of the registered modules would lack."""
        return self._names.strangers(
            p for group in self.optimizer.param_groups for p in group["params"]
        )

    def before_step(self, call: Callable[[], None]) -> Callable[[], None]:
        """A step pre-hook."""
        if not _is_hooked(self.optimizer):
            return _nothing
        hook = self.optimizer.register_step_pre_hook(lambda *_: call())
        return hook.remove

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Name to parameter, in the order of the optimizer's own numbering."""
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        return dict(zip(self._names.of(every), every, strict=True))

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


class _Names:
    """What the parameters of registered modules are called."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._modules = {
            name: unwrapped(thing)
            for name, thing in objects.items()
            if isinstance(thing, nn.Module)
        }
        self._known = self._look()  # holding them, so that none is taken for one that is gone
        self._seen: dict[int, frozenset[str]] = {}

    def see(self, module: nn.Module, keys: Iterable[str]) -> None:
        """Look through the modules anew if the keys of this one's state are no longer the same."""
        found = frozenset(keys)
        if self._seen.setdefault(id(module), found) != found:
            self._seen[id(module)] = found
            self._known = self._look()

    def of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Their names; what is in no module goes by its number.

        Modules are looked through again for a parameter that is not known, or when one has been
        seen to have changed; so their states are taken first.
        """
        if any(parameter not in self._known for parameter in parameters):
            self._known = self._look()
        return [self._known.get(parameter, f"#{i}") for i, parameter in enumerate(parameters)]

    def strangers(self, parameters: Iterable[torch.Tensor]) -> int:
        """How many of them are in no module, if there is any."""
        return sum(p not in self._known for p in parameters) if self._modules else 0

    def _look(self) -> dict[torch.Tensor, str]:
        known: dict[torch.Tensor, str] = {
            parameter: f"{name}.{path}"
            for name, module in self._modules.items()
            for path, parameter in module.named_parameters()
        }
        for name, count in Counter(known.values()).items():
            if count > 1:
                raise UsageError(
                    f"{count} parameters would be named {name}",
                    why="the name of an object and the path inside it make up a parameter's name",
                    fix="register one of the objects under another name",
                )
        return known


def parts(objects: Mapping[str, Any]) -> dict[str, Part]:
    """How to handle each of ``objects``.

    Raises:
        UsageError: one has neither ``state_dict`` nor ``load_state_dict``, or a bad name.
    """
    names = _Names(objects)
    # Modules come first: names of parameters follow from them. Random states come last wherever
    # all parts are loaded: nothing may move them on afterwards.
    modules = [name for name, thing in objects.items() if isinstance(thing, nn.Module)]
    order = sorted(
        objects, key=lambda name: (name not in modules, isinstance(objects[name], RandomState))
    )
    return {name: _part(name, objects[name], names) for name in order}


def _part(name: str, thing: Any, names: _Names) -> Part:
    if not isinstance(name, str) or not name or "/" in name:
        raise UsageError(f"{name!r} cannot name a registered object", fix="use a plain word")
    if isinstance(thing, nn.Module):
        return ModulePart(name, thing, names)
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


def _without(keys: AbstractSet[str], state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def _is_extra(key: str) -> bool:
    """Whether a module's ``get_extra_state()`` gave what lies at ``key`` of its state."""
    return key.rpartition(".")[2] == "_extra_state"


def _fits(live: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether one can be copied into the other, as it lies."""
    dense = live.layout is held.layout is torch.strided
    return dense and (live.shape, live.dtype) == (held.shape, held.dtype)


def _is_expanded(mine: torch.Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(mine.shape, mine.stride(), strict=True))


def _retyped(live: Any, saved: Any) -> Any:
    """``live`` with every tensor that is of another type than in ``saved`` taken from there."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() & saved.keys():
            live[key] = _retyped(live[key], saved[key])
    elif isinstance(live, list | tuple | deque) and type(live) is type(saved):
        items = [_retyped(*pair) for pair in zip(live, saved, strict=True)]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(live)(items)
    return live


def _laid_out(state: Any, parameter: torch.Tensor) -> Any:
    """The state of one parameter, each tensor of its shape as it lies in memory.

    Fused optimizers go through both as they lie; the file knows the order of indices only.
    """
    if isinstance(state, dict):
        return {key: _laid_out(value, parameter) for key, value in state.items()}
    if (
        not isinstance(state, torch.Tensor)
        or isinstance(state, DTensor)
        or state.shape != parameter.shape
        or state.stride() == parameter.stride()
    ):
        return state
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device).copy_(state)


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
