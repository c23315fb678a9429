"""What `p.grad` holds when `backward` has returned: a row of docs/gradients.md each, beside one process."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ring_notebook.torch as ring
from ranks.joint_training import make_model, momentum, plain_step
from ring_notebook.core import kept_state
from ring_notebook.errors import CollectiveAborted, CollectiveError
from ring_notebook.torch.optimizer import backward_end

PAGE = Path(__file__).parents[3] / "docs" / "gradients.md"
ROWS = 12
# Alone nothing is reduced: test_distributed.py.
pytestmark = [pytest.mark.sizes(2, 3, slow=(4,)), pytest.mark.usefixtures("hvd")]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(number: int = 0) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number), dtype=torch.double)


def share(x: Tensor, is_alone: bool = False) -> Tensor:
    return x if is_alone else x[ring.rank() :: ring.size()]


def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


Row = Callable[[nn.Module, Any, bool], object]
"""Runs backward passes of a model and its optimizer; True for the single process."""


def accumulated(model: nn.Module, optimizer: Any, alone: bool) -> None:
    for number in range(2):
        (loss(model, share(batch(number), alone)) / 2).backward()


def retained(model: nn.Module, optimizer: Any, alone: bool) -> None:
    value = loss(model, share(batch(), alone))
    value.backward(retain_graph=True)
    value.backward()


def penalized(model: nn.Module, optimizer: Any, alone: bool) -> None:
    x = share(batch(), alone).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + slope.square().mean()).backward()


def of_adversaries(model: nn.Module, optimizer: Any, alone: bool) -> None:
    """As in a GAN: a pass for one part leaves gradients in another one, which a second pass adds to."""
    x = share(batch(), alone)
    model[2](model[0](x)).mean().backward()
    model[0](x).square().mean().backward()


def contrasted(model: nn.Module, optimizer: Any, alone: bool) -> None:
    """Each row against those of all ranks."""
    own = model(share(batch(), alone))
    rows = own if alone else ring.allgather(own)
    if not alone:
        rows = rows + (ring.size() - 1) * (rows - rows.detach())
    (own @ rows.T).logsumexp(1).mean().backward()


def quietly_first(model: nn.Module, optimizer: Any, alone: bool) -> None:
    with nullcontext() if alone else optimizer.no_sync():
        loss(model, share(batch(0), alone)).backward()
    loss(model, share(batch(1), alone)).backward()


def checkpointed(reentrant: bool) -> Row:
    def row(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for number in range(3):  # the plan of the first pass knows nothing of passes within passes
            x = share(batch(number), alone).requires_grad_()
            loss(lambda one: model[2](checkpoint(model[:2], one, use_reentrant=reentrant)), x).backward()  # type: ignore[index]

    return row


def in_thread(model: nn.Module, optimizer: Any, alone: bool) -> None:
    worker = threading.Thread(target=lambda: loss(model, share(batch(), alone)).backward())
    worker.start()
    worker.join()


def compiled(model: nn.Module, optimizer: Any, alone: bool) -> None:
    inner: Any = torch.compile(model, backend="aot_eager")
    loss(inner, share(batch(), alone)).backward()


def functional(model: nn.Module, optimizer: Any, alone: bool) -> None:
    def of(values: dict[str, Tensor]) -> Tensor:
        return loss(lambda x: torch.func.functional_call(model, values, (x,)), share(batch(), alone))

    gradients = torch.func.grad(of)(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].detach()
    if not alone:
        optimizer.synchronize()


def on_one_rank_only(model: nn.Module, optimizer: Any, alone: bool) -> None:
    """The rows of rank 0 alone go through the first layer, and the last rank's through neither."""
    x = batch()
    rows = [torch.arange(ROWS) % ring.size() == rank for rank in range(ring.size())]
    first = x[rows[0]] if alone or ring.rank() == 0 else x[:0]
    later = x[~rows[-1]] if alone else x[rows[ring.rank()]] if ring.rank() < ring.size() - 1 else x[:0]
    total = torch.zeros((), dtype=torch.double)
    if len(first):
        total = total + model[0](first).square().sum()  # type: ignore[index]
    if len(later):
        total = total + model[2](later.repeat(1, 2)[:, :8]).square().sum()  # type: ignore[index]
    if total.requires_grad:
        (total / (ROWS if alone else ROWS / ring.size())).backward()
    elif not alone:
        optimizer.synchronize()


TABLE: dict[str, tuple[Row, dict[str, Any]]] = {
    "one pass": (lambda m, o, alone: loss(m, share(batch(), alone)).backward(), {}),
    "several passes before a step": (accumulated, {}),
    "`retain_graph=True`": (retained, {}),
    "a gradient penalty, `create_graph=True`": (penalized, {}),
    "rows beside those of all ranks, `g = ring.allgather(own)`, as `g + (p - 1) * (g - g.detach())`": (contrasted, {}),
    "passes that reach a part of the parameters": (of_adversaries, {}),
    "`no_sync()`, then a pass outside of it": (quietly_first, {}),
    "checkpointing, `use_reentrant=False`": (checkpointed(False), {}),
    "checkpointing, `use_reentrant=True`": (checkpointed(True), {}),
    "`backward()` in another thread": (in_thread, {}),
    "`torch.compile`": (compiled, {}),
    "`torch.func`, gradients set by hand, then `optimizer.synchronize()`": (functional, {}),
    "ranks that reach other parameters, or none": (on_one_rank_only, {}),
    "`backward_passes_per_step=2`": (accumulated, {"backward_passes_per_step": 2}),
    "`op=Sum`": (accumulated, {"op": ring.Sum}),
    "`compression=Compression.fp16`": (accumulated, {"compression": ring.Compression.fp16}),
}
ELSEWHERE = {
    "`torch.compile` around `backward()` and `step()`": "test_a_function_that_steps_may_be_compiled",
    "a backward pass by compiled autograd": "test_compiled_autograd_is_refused",
    "parameters in several optimizers": "test_optimizers_share_parameters",
    "`step()` in hooks of a pass, an optimizer for each parameter": "test_steps_within_a_pass",
    "`accumulate=2`, between its steps": "test_micro_batches_are_put_away",
    "sparse gradients": "test_sparse_gradients",
    "LBFGS and other closures": "test_gradients_within_a_closure",
    "`op=Adasum`": "test_what_keeps_gradients_of_its_own",
    "local steps, `sync_every=`": "test_what_keeps_gradients_of_its_own",
    "parameters that no optimizer has": "test_parameters_of_no_optimizer",
    "a pass that raises on a rank": "test_a_pass_that_raises",
    "an interrupt in a pass": "test_an_interrupt_in_a_pass",
}


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize("row", TABLE)
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # of torch on Python 3.13.0
def test_a_row_of_the_table(row: str, overlap: str, settings: Callable[..., None]) -> None:
    settings(overlap=overlap)
    run, options = TABLE[row]
    ours, alone = network(), network()
    factor = ring.size() if options.get("op") == ring.Sum else 1
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(ours.parameters(), 0.1), ours.named_parameters(), **options)
    for _ in range(3):
        run(ours, optimizer, False)
        run(alone, torch.optim.SGD(alone.parameters(), 0.1), True)
        for (name, got), want in zip(ours.named_parameters(), alone.parameters(), strict=True):
            if want.grad is None:
                assert got.grad is None, name
                continue
            assert got.grad is not None, name
            near = {"rtol": 2e-2, "atol": 1e-3} if "compression" in options else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(got.grad, want.grad * factor, **near)
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        with torch.no_grad():
            for got, want in zip(ours.parameters(), alone.parameters(), strict=True):
                want.copy_(got)


def test_the_page_has_these_rows() -> None:
    table = PAGE.read_text().partition("\n## Optimizers")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert rows[1:] == [*TABLE, *ELSEWHERE]
    assert all(one in globals() for one in ELSEWHERE.values())


@pytest.mark.parametrize("clip", [False, True])
def test_micro_batches_are_put_away(clip: bool) -> None:
    """A GradScaler grows between steps, not between their micro-batches; norms have parameters of no optimizer too."""
    ours, alone = network(), network()
    single = torch.optim.SGD(alone[0].parameters(), 0.1)
    ours, optimizer = ring.prepare(ours, torch.optim.SGD(ours[0].parameters(), 0.1), accumulate=1 if clip else 2)
    optimizer.accumulate(2)
    scalers = [torch.amp.GradScaler("cpu", 4.0, growth_interval=3) for _ in range(2)]
    for step in range(5):
        for number in range(2):
            scalers[0].scale(loss(ours, share(batch(2 * step + number)))).backward()
            if clip:
                scalers[0].unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.05)
            if number == 0:
                assert all(p.grad is None or not p.grad.any() for p in ours.parameters())
            scalers[0].step(optimizer)
            scalers[0].update()
            optimizer.zero_grad()
            scalers[1].scale(loss(alone, batch(2 * step + number)) / 2).backward()
        if clip:
            scalers[1].unscale_(single)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.05))
        scalers[1].step(single)
        scalers[1].update()
        ours.zero_grad()
        alone.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(alone.parameters()), rtol=1e-9, atol=1e-12)
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize("way", ["optimizer", "model", "by hand"])
def test_what_zero_grad_drops_of_micro_batches(way: str, overlap: str, settings: Callable[..., None]) -> None:
    """What came behind the last call of step(): of another loss, as in a GAN, or of a batch that is left out."""
    settings(overlap=overlap)
    ours, alone = network(), network()
    single = torch.optim.SGD(alone.parameters(), 0.1)
    ours, optimizer = ring.prepare(ours, torch.optim.SGD(ours.parameters(), 0.1), accumulate=3)
    zero = ours.zero_grad if way == "model" else optimizer.zero_grad
    counted = 0
    for number in range(12):
        (loss(ours, share(batch(100 + number))) * 100).backward()
        zero()
        value = loss(ours, share(batch(number)))
        if way == "by hand":
            found = torch.autograd.grad(value, list(ours.parameters()))
            for parameter, gradient in zip(ours.parameters(), found, strict=True):
                parameter.grad = gradient
        else:
            value.backward()
        if number in (1, 5, 9):
            continue
        optimizer.step()
        counted += 1
        (loss(alone, batch(number)) / 3).backward()
        if counted % 3 == 0:
            single.step()
            single.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(alone.parameters()), rtol=1e-9, atol=1e-12)


def test_micro_batches_are_calls_of_step() -> None:
    model = network()
    _, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=2)
    with pytest.raises(RuntimeError, match=r"accumulate=2 counts calls .* does not allow step\(closure\)"):
        optimizer.step(lambda: loss(model, share(batch())))


def from_a_snapshot(both: Any) -> Any:
    content = kept_state.dump({"both": both}, lambda _: pytest.fail("so little stays in one file")).content
    place = ring.rank(), ring.size()
    return kept_state.load(place, ring.size(), lambda _: content, lambda *_: None).values["both"]


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize(
    ("accumulate", "copied"), [(3, copy.deepcopy), (3, pickled), (1, from_a_snapshot), (3, from_a_snapshot)]
)
def test_a_copy_keeps_how_gradients_are_averaged(accumulate: int, copied: Callable[[Any], Any]) -> None:
    """Also of micro-batches, and a snapshot of what no optimizer has."""
    model = network()
    own = model if accumulate > 1 else model[0]
    model, optimizer = ring.prepare(model, torch.optim.SGD(own.parameters(), 0.1, 0.9), accumulate=accumulate)
    for number in range(4):
        plain_pass(model, optimizer, number)
    other, twin = copied((model, optimizer))
    assert twin.same_step.compares
    for number in range(2):
        for one, stepping in ((model, optimizer), (other, twin)):
            one[2].zero_grad()
            plain_pass(one, stepping, number)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)
    grads = [[p.grad for p in one.parameters()] for one in (other, model)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def plain_pass(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss(model, share(batch(number))).backward()
    optimizer.step()


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_steps_within_a_pass(order: str, overlap: str, settings: Callable[..., None]) -> None:
    """An optimizer for each parameter steps in a hook, which frees the gradient: torch's tutorial against memory."""
    settings(overlap=overlap)
    ours, alone = network(), network()

    def step_in_hooks(model: nn.Module, by: dict[Tensor, Any]) -> None:
        def step(parameter: Tensor) -> None:
            by[parameter].step()
            by[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    made = [{p: torch.optim.SGD([p], 0.1) for p in one.parameters()} for one in (ours, alone)]
    prepared: dict[Tensor, Any] = {}
    if order == "before":
        step_in_hooks(ours, prepared)
    prepared |= {p: ring.DistributedOptimizer(one) for p, one in made[0].items()}
    if order == "behind":
        step_in_hooks(ours, prepared)
    step_in_hooks(alone, made[1])
    for number in range(4):
        loss(ours, share(batch(number))).backward()
        loss(alone, batch(number)).backward()
    torch.testing.assert_close(list(ours.parameters()), list(alone.parameters()), rtol=1e-9, atol=1e-12)


def test_sparse_gradients() -> None:
    table = nn.Embedding(8, 3, sparse=True)
    optimizer = ring.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([ring.rank()])).sum().backward()
        grad = table.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.to_dense()[:, 0].tolist() == pytest.approx(
            [1 / ring.size()] * ring.size() + [0] * (8 - ring.size())
        )
        optimizer.step()


def test_gradients_within_a_closure() -> None:
    ours, alone = network(), network()
    made = [torch.optim.LBFGS(one.parameters(), 0.3, max_iter=4) for one in (ours, alone)]
    ours, optimizer = ring.prepare(ours, made[0])
    norms: list[list[float]] = [[], []]
    for kind, (model, one) in enumerate(((ours, optimizer), (alone, made[1]))):

        def closure(model: nn.Module = model, one: Any = one, kind: int = kind) -> Tensor:
            one.zero_grad()
            value = loss(model, share(batch(), kind == 1))
            value.backward()
            norms[kind].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            return value

        one.step(closure)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("options", [{"op": ring.Adasum}, {"sync_every": 4}], ids=["adasum", "local"])
def test_what_keeps_gradients_of_its_own(options: dict[str, Any]) -> None:
    model = network()
    ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
    other = network()
    for one in (model, other):
        loss(one, share(batch())).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_parameters_of_no_optimizer() -> None:
    ours, alone = network(), network()
    ours, optimizer = ring.prepare(ours, torch.optim.SGD(ours[0].parameters(), 0.1))
    for number in range(2):
        loss(ours, share(batch(number))).backward()
        loss(alone, batch(number)).backward()
        for got, want in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
        optimizer.step()
        ours.zero_grad()
        alone.zero_grad()
        alone.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize("zero", ["optimizer", "model", "none"])
def test_a_pass_that_raises(overlap: str, zero: str, settings: Callable[..., None]) -> None:
    """A rank that leaves out its batch after an exception leaves it out on all: their passes raise too."""
    settings(overlap=overlap, fusion_threshold=100)
    model = network()
    model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    caught: list[int | str] = []
    for number in range(6):
        optimizer.zero_grad()
        value = loss(model, share(batch(number)))
        if number == 3 and ring.rank() == 1:
            bad = model[0].weight.register_hook(lambda _: 1 / 0)
        try:
            value.backward()
        except ZeroDivisionError:
            bad.remove()
            caught.append(number)
            if zero != "none":
                (optimizer if zero == "optimizer" else model).zero_grad()
            continue
        except RuntimeError as error:
            caught.append(number if "rank 1 raised" in str(error) else str(error))
            continue
        optimizer.step()
    assert caught == [3]
    ring.check(model, optimizer)


def test_an_interrupt_in_a_pass() -> None:
    """It ends the generation, on all ranks; the next one begins with gradients of its own."""
    ours, alone = network(), network()
    ours, optimizer = ring.prepare(ours, torch.optim.SGD(ours.parameters(), 0.1))
    loss(ours, share(batch())).backward()
    optimizer.step()
    alone.load_state_dict(ours.state_dict())
    optimizer.zero_grad()
    value = loss(ours, share(batch()))
    last = ring.size() - 1

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    hook = ours[0].weight.register_hook(interrupt) if ring.rank() == last else None
    with pytest.raises((KeyboardInterrupt, CollectiveAborted)):  # noqa: PT012
        try:
            value.backward()
        except KeyboardInterrupt:
            from ring_notebook.core import world

            world.fail(KeyboardInterrupt())
            raise
    if hook is not None:
        hook.remove()
    ring.shutdown()
    ring.init()
    optimizer.zero_grad()
    loss(ours, share(batch(1))).backward()
    loss(alone, batch(1)).backward()
    for got, want in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    optimizer.step()


def test_passes_of_ranks_that_part_are_named() -> None:
    """One rank skips a backward pass and its step: the others' next collective says so, and nobody waits."""
    model = network()
    model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CollectiveError, match=r"optimizer step|backward pass"):  # noqa: PT012
        for number in range(3):
            if number == 1 and ring.rank() == 0:
                ring.allreduce(torch.ones(1), name="another")
            optimizer.zero_grad()
            loss(model, share(batch(number))).backward()
            optimizer.step()


def test_without_the_private_names_the_step_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_end, "ENDS_ARE_SEEN", False)
    ours, alone = network(), network()
    single = torch.optim.SGD(alone.parameters(), 0.1)
    ours, optimizer = ring.prepare(ours, torch.optim.SGD(ours.parameters(), 0.1))
    for number in range(3):
        for model, one in ((ours, optimizer), (alone, single)):
            one.zero_grad()
            loss(model, share(batch(number), model is alone)).backward()
            norm = ring.clip_grad_norm_ if model is ours else nn.utils.clip_grad_norm_
            norm(model.parameters(), 0.1)
            one.step()
    torch.testing.assert_close(list(ours.parameters()), list(alone.parameters()))


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("passes", ["each", "both"])
def test_optimizers_share_parameters(rank: int, size: int, op: str, passes: str) -> None:
    """An encoder in two optimizers, which step on a pass each or on one, and a second one that is dropped again."""

    def trained(alone: bool) -> list[torch.Tensor]:
        model = make_model()
        kind = torch.optim.Adam if passes == "each" else torch.optim.SGD  # one whose steps have no scale, or have one
        first, last = torch.optim.SGD(model.parameters(), lr=0.1), kind(model.first.parameters(), lr=0.01)
        if not alone:
            first, last = ring.prepare(model, first, last, op=getattr(ring, op))[1:]
        x = torch.linspace(-1, 1, 7 * size).reshape(size, 7).sin()
        factor = size if alone and op == "Sum" else 1
        for step in range(6):
            used = [first, last] if step < 4 else [first]
            for optimizer in used:
                if passes == "each" or optimizer is first:
                    optimizer.zero_grad()
                    (factor * model(x if alone else x[rank : rank + 1]).square().mean()).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if passes == "both":
                    for parameter in model.parameters():
                        parameter.grad = 0.5 * parameter.grad if optimizer is first else parameter.grad
                optimizer.step()
            if step == 3:
                del last, optimizer, used
        return list(model.parameters())

    torch.testing.assert_close(trained(alone=False), trained(alone=True))


def test_many_optimizers_of_which_ranks_reach_others(rank: int, size: int) -> None:
    """Also in the first pass, when the ranks know of them by name only."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(70)]
    made = [ring.DistributedOptimizer(torch.optim.SGD([w], 1.0), [(f"w{i}", w)]) for i, w in enumerate(weights)]
    for step in range(3):
        torch.stack([w for i, w in enumerate(weights) if (i + step) % size == rank]).sum().backward()
        for one in made:
            one.step()
            one.zero_grad()
    torch.testing.assert_close(torch.stack(list(weights)).detach(), torch.full((70, 2), -3 / size))


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (3, 5), (4, 4)], ids=str)
def test_a_gradient_set_by_hand_in_another_layout(rank: int, shape: tuple[int, ...]) -> None:
    """Of a square one no size would tell."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = ring.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    wanted = torch.arange(float(weight.numel())).view(shape)
    for _ in range(2):
        weight.grad = wanted.mT.contiguous().mT if rank == 0 else wanted.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), -2 * wanted)


@pytest.mark.sizes(2)
def test_optimizers_that_share_parameters_accumulate_by_hand() -> None:
    model = make_model()
    _, first, _ = ring.prepare(model, momentum(model), momentum(model), accumulate=2)
    with pytest.raises(RuntimeError, match="accumulate needs an optimizer that shares no parameter with another one"):
        plain_step(model, first, (torch.ones(2, 7), torch.ones(2, 3)))


@pytest.mark.parametrize("way", ["averages", "closure", "Adasum", "sync_every", "DDP"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.sizes(2)
def test_a_function_that_steps_may_be_compiled(rank: int, way: str) -> None:
    """Steps, hooks and logs are called as they are: a compiler would take a generation's objects for constants."""

    def trained(compiled: bool) -> list[torch.Tensor]:
        model = make_model()
        options = {"Adasum": {"op": ring.Adasum}, "sync_every": {"sync_every": 2}, "DDP": {"strategy": "ddp"}}
        model, optimizer = ring.prepare(model, momentum(model), **options.get(way, {}))

        def backward(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def step(x: torch.Tensor) -> None:
            if way == "closure":
                optimizer.step(lambda: backward(x))
            else:
                backward(x)
                optimizer.step()

        run = torch.compile(step, backend="eager") if compiled else step
        for number in range(3):
            run(torch.full((2, 7), 1.0 + rank + number))
        return list(model.parameters())

    torch.testing.assert_close(trained(compiled=True), trained(compiled=False))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.sizes(slow=(2,))
def test_compiled_autograd_is_refused() -> None:
    model = network()
    _, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(RuntimeError, match=r"rank \d: gradients are averaged at the end .*compiled_autograd off"),
    ):
        torch.compile(lambda x: loss(model, x).backward(), backend="eager")(share(batch()))
    optimizer.zero_grad()
    loss(model, share(batch())).backward()
    optimizer.step()
