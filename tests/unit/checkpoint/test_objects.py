from collections import deque

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver
from torch.testing._internal.two_tensor import TwoTensor

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.objects import parts
from slurmspot.checkpoint.state import take
from slurmspot.errors import CheckpointWriteError, MismatchedCheckpointError, UsageError


def save(folder, **objects):
    checkpointer = Checkpointer(folder, objects)
    checkpointer.save(1, trigger="period", meta={})
    checkpointer.wait()


def restore(folder, **objects):
    assert Checkpointer(folder, objects).restore().step == 1


def grown(model, optimizer):
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def small():
    model = nn.Sequential(nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_parameters_that_come_after_the_checkpointer_have_names(tmp_path):
    model, optimizer = small()
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    grown(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.save(1, trigger="period", meta={})
    checkpointer.wait()
    other, other_optimizer = small()
    grown(other, other_optimizer)
    restore(tmp_path, model=other, optimizer=other_optimizer)
    momentum = other_optimizer.state[other[1].weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model[1].weight]["momentum_buffer"])


def test_modules_are_looked_through_for_unknown_parameters_only():
    looks = []

    class Looked(nn.Sequential):
        def named_parameters(self, *args, **kwargs):
            looks.append(self)
            return super().named_parameters(*args, **kwargs)

    model = Looked(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = parts({"model": model, "optimizer": optimizer})["optimizer"]
    looks.clear()
    part.state()
    assert not looks
    grown(model, optimizer)
    part.state()
    part.state()
    assert len(looks) == 1


def test_a_parameter_that_is_gone_gives_its_name_to_no_other():
    model, optimizer = small()
    part = parts({"model": model, "optimizer": optimizer})["optimizer"]
    optimizer.param_groups.clear()
    model[0] = nn.Identity()
    for _ in range(20):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    names = [group["params"] for group in part.state()["param_groups"]]
    assert names == [[f"#{i}"] for i in range(20)]


class Preconditioned(torch.optim.Optimizer):
    """Has float32 matrices in containers, whatever the type of its parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "list": [torch.randn(3, 3)],
                "dict": {"pair": (torch.randn(3), [torch.randn(2)])},
                "deque": deque([torch.randn(3)], maxlen=4),
            }


def test_state_inside_containers_keeps_its_bits(tmp_path):
    weight = nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))
    optimizer = Preconditioned([weight])
    optimizer.step()
    save(tmp_path, optimizer=optimizer)
    other = nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    other_optimizer = Preconditioned([other])
    restore(tmp_path, optimizer=other_optimizer)
    assert str(other_optimizer.state[other]) == str(optimizer.state[weight])


class Counting(nn.Linear):
    """Its extra state is a tensor that grows."""

    def __init__(self, width=2):
        super().__init__(width, 2)
        self.seen = torch.zeros(0)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_of_another_shape(tmp_path):
    model = nn.Sequential(Counting())
    model[0].seen = torch.ones(3)
    save(tmp_path, model=model)
    other = nn.Sequential(Counting())
    restore(tmp_path, model=other)
    assert other[0].seen.tolist() == [1, 1, 1]


def test_a_module_may_keep_the_extra_state_that_is_put_back(tmp_path):
    model = Counting()
    checkpointer = Checkpointer(tmp_path, {"model": model})
    model.seen = torch.ones(3)
    held = checkpointer.hold()
    for _ in range(2):
        model.seen += 1
        checkpointer.put_back(held)
        assert model.seen.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        PerChannelMinMaxObserver,
        lambda: FakeQuantize(PerChannelMinMaxObserver, 0, 255, ch_axis=0),
    ],
)
def test_a_quantizer_that_has_seen_data_comes_back_in_one_that_has_not(tmp_path, make):
    quantizer = make()
    quantizer(torch.randn(4, 4))
    save(tmp_path, model=nn.Sequential(quantizer))
    other = make()
    restore(tmp_path, model=nn.Sequential(other))
    assert str(other.state_dict()) == str(quantizer.state_dict())


class Plain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("values", torch.ones(size))


class Own(Plain):
    """Loads in its own way."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


class OwnParameter(Own):
    def __init__(self, size):
        super().__init__(0)
        self.weight = nn.Parameter(torch.ones(size))


def pair(*, tied):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("saved", "live", "problem"),
    [
        (lambda: Plain(3), lambda: Plain(0), r"saved float32 \[3\], expected float32 \[0\]"),
        (lambda: Own(3), lambda: Own(2), r"saved float32 \[3\], expected float32 \[2\]"),
        (lambda: OwnParameter(3), lambda: OwnParameter(0), r"expected float32 \[0\]"),
        (lambda: Own(3).double(), lambda: Own(0), r"saved float64 \[3\], expected float32 \[3\]"),
        (lambda: Counting(3), Counting, r"saved float32 \[2, 3\], expected float32 \[2, 2\]"),
        (Counting, lambda: nn.Linear(2, 2), "_extra_state\n.*saved extra state, expected none"),
        (lambda: nn.Linear(2, 2), Counting, "_extra_state\n.*saved no extra state"),
        (lambda: pair(tied=False), lambda: pair(tied=True), "1.weight.*\n.*apart from .*0.weight"),
    ],
)
def test_what_a_module_cannot_take_is_refused_with_nothing_changed(tmp_path, saved, live, problem):
    """Not even the object before it, which it could take."""
    save(tmp_path, first=nn.Linear(2, 2), model=saved())
    first, model = nn.Linear(2, 2), live()
    checkpointer = Checkpointer(tmp_path, {"first": first, "model": model})
    before = checkpointer.digest(["first", "model"])
    with pytest.raises(MismatchedCheckpointError, match=problem):
        checkpointer.restore()
    assert checkpointer.digest(["first", "model"]) == before


def test_tied_parameters_come_back_tied_or_not(tmp_path):
    model = pair(tied=True)
    save(tmp_path, model=model)
    for tied in (True, False):
        other = pair(tied=tied)
        restore(tmp_path, model=other)
        assert torch.equal(other[1].weight, model[0].weight)


def test_a_tensor_around_other_tensors_fails_the_save(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    with pytest.raises(CheckpointWriteError, match=r"model/weight .*TwoTensor wraps"):
        save(tmp_path, model=model)


def test_a_subclass_with_memory_of_its_own_is_stored():
    class Image(torch.Tensor):
        pass

    image = torch.ones(2).as_subclass(Image)
    assert take("thing", {"image": image}).tensors.keys() == {"thing/image"}


def test_two_parameters_with_one_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"named net.0.weight"):
        Checkpointer(tmp_path, {"net": nn.Sequential(nn.Linear(2, 2)), "net.0": nn.Linear(2, 2)})


def test_one_parameter_may_have_two_names(tmp_path):
    model = pair(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"net": model, "net.0": model[0], "tail": model[1], "optimizer": optimizer}
    save(tmp_path, **objects)
    restore(tmp_path, **objects)


def images(memory_format):
    model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
    return model, torch.optim.Adam(model.parameters(), fused=True)


def train(model, optimizer, *, seed):
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 6, 6)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_fused_optimizers_go_on_alike_whatever_the_layout_of_parameters(tmp_path, memory_format):
    """They pair numbers as they lie in memory."""
    model, optimizer = images(memory_format)
    train(model, optimizer, seed=1)
    save(tmp_path, model=model, optimizer=optimizer)
    train(model, optimizer, seed=2)
    other, other_optimizer = images(memory_format)
    restore(tmp_path, model=other, optimizer=other_optimizer)
    train(other, other_optimizer, seed=2)
    assert torch.equal(other.weight, model.weight)


def test_what_is_put_back_lies_as_it_did(tmp_path):
    model, optimizer = images(torch.channels_last)
    train(model, optimizer, seed=1)
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    held = checkpointer.hold()
    train(model, optimizer, seed=2)
    after = model.weight.detach().clone()
    checkpointer.put_back(held)
    train(model, optimizer, seed=2)
    assert torch.equal(model.weight, after)


def test_a_model_that_was_restructured_is_saved_under_its_new_names(tmp_path):
    def wrapped():
        model, optimizer = small()
        model[0] = nn.Sequential(model[0])
        return model, optimizer

    model, optimizer = small()
    checkpointer = Checkpointer(tmp_path, {"optimizer": optimizer, "model": model})
    checkpointer.save(0, trigger="period", meta={}, blocking=True)
    model[0] = nn.Sequential(model[0])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.save(1, trigger="period", meta={}, blocking=True)
    other, other_optimizer = wrapped()
    restore(tmp_path, optimizer=other_optimizer, model=other)
    momentum = other_optimizer.state[other[0][0].weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model[0][0].weight]["momentum_buffer"])


class Growing(nn.Module):
    """A buffer outside the state that its first forward makes larger, as caches of positions do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(4, 3, sparse=True)
        self.inner.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, rows):
        self.inner.cache = torch.ones(len(rows))
        return self.inner(rows)


def test_caches_that_grow_and_sparse_gradients_are_put_back(tmp_path):
    model = Growing()
    checkpointer = Checkpointer(tmp_path, {"model": model})
    model(torch.tensor([1])).sum().backward()
    held = checkpointer.hold()
    model(torch.tensor([2, 3])).sum().backward()
    checkpointer.put_back(held)
    assert model.inner.cache.tolist() == [1]
    assert model.inner.weight.grad.coalesce().indices().tolist() == [[1]]
    model(torch.tensor([2, 3])).sum().backward()
    assert model.inner.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]


def test_parameters_that_no_registered_object_has_are_not_left_out_unsaid(tmp_path):
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(CheckpointWriteError, match="1 parameters that are in no registered object"):
        save(tmp_path, model=model, optimizer=optimizer)
    owner = nn.ParameterList([extra])
    save(tmp_path, model=model, optimizer=optimizer, owner=owner)


def test_an_expanded_tensor_is_refused_before_anything_is_saved(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(1, 2).expand(3, 2))
    with pytest.raises(UsageError, match="model/wide could not be restored"):
        Checkpointer(tmp_path, {"model": model})


def test_a_name_must_be_a_word(tmp_path):
    with pytest.raises(UsageError, match="1 cannot name"):
        Checkpointer(tmp_path, {1: nn.Linear(2, 2)})
