"""Training loops as people write them, as the source of one function that runs alone and on ranks.

`loops` draws a `Loop`, `source` writes it down. ``train(ring, rank, size)`` of that source returns the weights after a
few steps; with ``ring=None`` one process trains on the batches of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

from hypothesis import strategies as st

PARTS = {
    # name: (declaration, what it adds to `out` of shape (rows, 3))
    "mlp": ("self.mlp = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))", "out = out + self.mlp(x)"),
    "shared": (
        "self.one = nn.Linear(6, 6); self.two = nn.Linear(6, 3); self.tied = self.one",
        "out = out + self.two(torch.tanh(self.tied(torch.tanh(self.one(x)))))",
    ),
    "frozen": (
        "self.frozen = nn.Linear(6, 3); self.frozen.requires_grad_(False)",
        "out = out + torch.tanh(self.frozen(x))",
    ),
    "unused": ("self.unused = nn.Linear(6, 3)", "pass"),
    "number": ("self.number = nn.Parameter(torch.tensor(0.7))", "out = out * self.number"),
    "complex": (
        "self.spectral = nn.Parameter(torch.randn(4, 4, dtype=torch.cdouble) / 3)",
        "out = out + torch.fft.irfft(torch.fft.rfft(x) @ self.spectral, n=6)[:, :3]",
    ),
    "sparse": (
        "self.table = nn.Embedding(20, 3, sparse=True)",
        "out = out + self.table((x[:, 0].abs() * 7).long() % 20)",
    ),
    "norm": (
        "self.norm = nn.BatchNorm1d(6) if self.ring is None else self.ring.SyncBatchNorm(6)",
        "x = self.norm(x)",
    ),
    "dropout": (
        "",  # of a row, so that a row is dropped alike wherever it is
        "x = x * ((x.sum(1, keepdim=True) * 97 + torch.arange(6)).sin() > -0.5) / 0.75",
    ),
    "seldom": (
        "self.seldom = nn.Linear(6, 3)",
        "rows = (x[:, 1] > 0.9).nonzero()[:, 0]\n"
        "if len(rows): out = out.index_add(0, rows, torch.tanh(self.seldom(x[rows])))",
    ),
    "checkpoint": (
        "self.deep = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))",
        "out = out + checkpoint(self.deep, x.clone().requires_grad_(), use_reentrant=self.reentrant)",
    ),
}
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(@, lr=0.05)",
    "momentum": "torch.optim.SGD(@, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "Adam": "torch.optim.Adam(@, lr=0.02)",
    "AdamW": "torch.optim.AdamW(@, lr=0.02, weight_decay=0.1, amsgrad=True)",
    "Adagrad": "torch.optim.Adagrad(@, lr=0.05)",
    "RMSprop": "torch.optim.RMSprop(@, lr=0.01, centered=True, momentum=0.5)",
    "Adadelta": "torch.optim.Adadelta(@, lr=0.5)",
    "Adamax": "torch.optim.Adamax(@, lr=0.02)",
    "NAdam": "torch.optim.NAdam(@, lr=0.02)",
    "RAdam": "torch.optim.RAdam(@, lr=0.02)",
    "ASGD": "torch.optim.ASGD(@, lr=0.05)",
    "Rprop": "torch.optim.Rprop(@, lr=0.01)",
    "Adafactor": "torch.optim.Adafactor(@, lr=0.02)",
    "Lion": "lion_pytorch.Lion(@, lr=0.003)",
    "AdaBelief": "pytorch_optimizer.AdaBelief(@, lr=0.02)",
    "ScheduleFree": "schedulefree.SGDScheduleFree(@, lr=0.05)",
    "SAM": "SAM(@, lr=0.05)",
    "LBFGS": "torch.optim.LBFGS(@, lr=0.2, max_iter=3)",
}
_NOT_COMPLEX = {"Adafactor", "Lion", "AdaBelief", "Rprop", "SAM", "LBFGS", "ScheduleFree", "ASGD", "Adamax", "NAdam"}
SCHEDULES = {
    "none": "",
    "StepLR": "torch.optim.lr_scheduler.StepLR(@, 2, gamma=0.5)",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR(@, max_lr=0.1, total_steps=40, cycle_momentum=False)",
    "Cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(@, 6, eta_min=1e-3)",
    "Plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(@, patience=0, factor=0.5)",
    "Sequential": "torch.optim.lr_scheduler.SequentialLR(@, [torch.optim.lr_scheduler.ConstantLR(@, 0.5, 2), "
    "torch.optim.lr_scheduler.ExponentialLR(@, 0.9)], [2])",
}
CLIPS = {
    "none": "",
    "norm": "norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))",
    "ours": "norms.append(float((ring.clip_grad_norm_ if ring else nn.utils.clip_grad_norm_)(own(model), 0.3)))",
    "value": "nn.utils.clip_grad_value_(model.parameters(), 0.02)",
    "groups": "for one in optimizers:\n    for group in one.param_groups: "
    "nn.utils.clip_grad_norm_(group['params'], 0.1)",
    "hand": "for p in model.parameters():\n    if p.grad is not None: p.grad = p.grad / (p.grad.norm() + 1e-3)",
    "skip": "norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))\n"
    "if norms[-1] > 1.3: zero(); continue",
}
ZEROS = {
    "optimizers": "for one in optimizers: one.zero_grad()",
    "model": "model.zero_grad()",
    "zeros": "for one in optimizers: one.zero_grad(set_to_none=False)",
    "hand": "for p in model.parameters(): p.grad = None",
}
LOSSES = {
    "one": "backward(loss_of(model(x), y))",
    "two": "out = model(x)\nbackward(loss_of(out, y), retain_graph=True)\nbackward(out.square().mean())",
    "again": "backward(loss_of(model(x), y))\nbackward(0.5 * loss_of(model(x * 0.5), y))",
    "penalty": "x.requires_grad_()\nout = model(x)\n"
    "(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
    "backward(loss_of(out, y) + 0.1 * slope.square().sum(1).mean())",
    "by hand": "found = torch.autograd.grad(factor * loss_of(model(x), y), trained := [p for p in model.parameters() "
    "if p.requires_grad], allow_unused=True)\n"
    "for p, g in zip(trained, found):\n"
    "    if g is not None: p.grad = g if p.grad is None else p.grad + g",
    "thread": "worker = threading.Thread(target=lambda: backward(loss_of(model(x), y)))\nworker.start(); worker.join()",
}
MIDDLES = {
    "none": "",
    "freeze": "model.head.requires_grad_(step not in (2, 3))",
    "add": "if step == 2:\n    model.more = nn.Linear(6, 3).double()\n    seeded(model.more)\n"
    "    optimizers[0].add_param_group({'params': list(model.more.parameters())})",
    "copy": "if step == 2: model, optimizers, schedules = copy.deepcopy((model, optimizers, schedules))",
    "save": "if step == 2:\n    for one in optimizers: one.load_state_dict(copy.deepcopy(one.state_dict()))",
    "evaluate": "with torch.no_grad(): model(x)",
    "again": "if ring and step == 2: model, optimizers, schedules, quiet = again(model, optimizers, schedules)",
    "error": "if step == 2:\n    zero()\n"
    "    handle = next(p for p in model.parameters() if p.requires_grad).register_hook(lambda _: 1 / 0)\n"
    "    with contextlib.suppress(ZeroDivisionError): backward(loss_of(model(x), y))\n"
    "    handle.remove(); zero()",
}
OPTIONS = {
    "none": "",
    "equal groups": ", num_groups=2",
    "lists": ", groups=[trained[:2], trained[3:4]]",
    "dense": ", sparse_as_dense=True",
    "predivide": ", gradient_predivide_factor=4.0",
}
GATHERS = ("no", "by hand", "no_sync", "accumulate", "passes")
WAYS = ("prepare", "distributed", "sum", "ddp", "strategy", "fsdp", "logical")
AMPS = ("no", "scaler", "unscale")


@dataclass(frozen=True)
class Loop:
    """What a loop is made of: keys of the tables above."""

    way: str
    parts: tuple[str, ...]
    optimizers: tuple[str, ...]
    schedule: str
    clip: str
    zero: str
    loss: str
    gather: str
    amp: str
    middle: str
    option: str
    closure: bool
    ema: bool
    loader: str
    reentrant: bool
    rest: bool
    overlap: str
    shared: bool
    begun: bool
    seed: int


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """A loop that one process can run."""
    choose = lambda options: draw(st.sampled_from(list(options)))  # noqa: E731
    parts = ["mlp", *sorted(draw(st.sets(st.sampled_from([one for one in PARTS if one != "mlp"]), max_size=3)))]
    way = choose(WAYS)
    loss, gather, clip, amp, middle = choose(LOSSES), choose(GATHERS), choose(CLIPS), choose(AMPS), choose(MIDDLES)
    option, schedule, loader = choose(OPTIONS), choose(SCHEDULES), choose(("slices", "loader", "shuffled"))
    if way == "logical":  # its turns are batches of the loader, each of other rows than a micro-batch of one process
        parts = [one for one in parts if one not in ("norm", "sparse")]
        gather = choose(("no", "accumulate"))
        loader = "loader" if loader == "slices" else loader
        schedule = "none" if schedule == "Plateau" else schedule
        loss = "one" if loss == "by hand" else loss
    if way == "fsdp":  # whose parameters are shards
        parts = [one for one in parts if one in ("shared", "frozen", "dropout")]
        clip = clip if clip in ("none", "norm", "value", "skip") else "norm"
        middle = "again" if middle == "again" else "none"
        loss, gather = "one" if loss in ("by hand", "penalty") else loss, "no" if gather == "no" else "by hand"
        amp = "no"
    if way == "strategy":
        parts = [one for one in parts if one not in ("norm", "unused", "frozen")]  # each is to have a gradient
    if way in ("ddp", "strategy"):  # what torch's own refuses or does otherwise
        parts = [one for one in parts if one not in ("sparse", "checkpoint", "seldom", "complex")]
        loss = loss if loss in ("one", "thread") else "one"
        gather = gather if gather in ("no", "by hand", "no_sync") else "no"
        clip = "norm" if clip == "ours" else clip
        middle = middle if middle in ("none", "save", "again") else "none"
    if (gather == "accumulate" and way not in ("prepare", "logical")) or (
        gather == "passes" and way not in ("distributed", "sum")
    ):
        gather = "by hand"
    if gather == "passes" or (gather == "accumulate" and way == "logical"):
        loss = "one" if loss in ("two", "again", "by hand") else loss
    if loss == "by hand":  # which nothing reduces before clipping or the step
        parts = [one for one in parts if one not in ("checkpoint", "sparse")]
        clip, amp = "none" if clip == "none" or gather == "accumulate" else "ours", "no"
    if loss == "penalty":
        parts = [one for one in parts if one != "norm"]
    wanted = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=3))
    refused = {"ddp": ["LBFGS"], "strategy": ["LBFGS"], "logical": ["LBFGS", "SAM"]}  # each rank has its own loss
    wanted = ["SGD" if one in refused.get(way, ()) else one for one in wanted]
    if way == "fsdp":
        elementwise = ("SGD", "momentum", "Adam", "AdamW", "Adagrad", "RMSprop")
        wanted = [one if one in elementwise else "Adam" for one in wanted]
    if way in ("strategy", "fsdp"):
        wanted = wanted[:1]
    closure = way not in ("logical", "fsdp") and (draw(st.booleans()) or "LBFGS" in wanted)
    if closure or "SAM" in wanted:
        # A closure, or two passes for one step, are written out below for one micro-batch at a time.
        gather, amp, clip = "no", "no", "none" if clip == "skip" else clip
        loss = "one" if loss == "by hand" else loss
        middle = "none" if middle == "copy" else middle
        wanted = ["SAM"] if "SAM" in wanted else wanted[:1]
        closure = wanted[0] != "SAM"
        middle = "none" if middle == "add" else middle
    if "sparse" in parts:
        wanted = [one if one in ("SGD", "Adagrad") else "SGD" for one in wanted]
        clip = "none" if clip in ("value", "hand") else clip
        amp = "no"
        closure = closure and wanted[0] != "LBFGS"
    if "complex" in parts:
        wanted = ["Adam" if one in _NOT_COMPLEX else one for one in wanted]
        clip = "none" if clip in ("value", "hand") else clip
        amp = "no"
    if middle in ("error", "evaluate") and (gather == "passes" or (gather == "accumulate" and way == "logical")):
        middle = "none"  # it is of a batch outside of the count
    middle = "none" if middle == "again" and way not in ("prepare", "strategy", "fsdp", "logical") else middle
    middle = "none" if middle == "error" and loss == "by hand" else middle
    if way not in ("prepare", "distributed", "sum") or (option == "lists" and len(wanted) > 1):
        option = "none"
    if option == "predivide" and (way == "sum" or "sparse" in parts):
        option = "dense"
    if amp != "no" or gather == "accumulate":
        clip = "norm" if clip == "skip" else clip
    return Loop(
        way=way,
        parts=tuple(parts),
        optimizers=tuple(wanted),
        schedule=schedule,
        clip=clip,
        zero=choose(ZEROS),
        loss=loss,
        gather=gather,
        amp=amp,
        middle=middle,
        option=option,
        closure=closure,
        ema=way != "fsdp" and draw(st.booleans()),
        loader=loader,
        reentrant=loss not in ("penalty", "by hand") and draw(st.booleans()),
        # What no optimizer has is dropped with a pass that raises, and belongs to one model.
        rest=way in ("prepare", "ddp", "strategy", "fsdp", "logical")
        and middle not in ("copy", "error", "freeze")
        and (way, clip) != ("logical", "hand")
        and draw(st.booleans()),
        overlap=choose(("inline", "thread")),
        shared=gather != "accumulate" and way != "logical" and draw(st.booleans()),
        begun=not closure and wanted[0] != "SAM" and draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def source(loop: Loop) -> str:
    """The script of a loop; run by ``ringrun -np 2 python FILE`` it prints how far the ranks are from one process."""
    declare = "\n".join(PARTS[one][0] for one in loop.parts if PARTS[one][0])
    forward = "\n".join(PARTS[one][1] for one in loop.parts)
    micro = 2 if loop.gather != "no" else 1
    groups = len(loop.optimizers)
    made = ", ".join(OPTIMIZERS[one].replace("@", f"shares[{n}]") for n, one in enumerate(loop.optimizers))
    schedule = f"[{SCHEDULES[loop.schedule].replace('@', 'one')} for one in optimizers]"
    options = {
        "prepare": ", accumulate=2" if loop.gather == "accumulate" else "",
        "distributed": ", backward_passes_per_step=2" if loop.gather == "passes" else "",
        "sum": f", op=ring.Sum{', backward_passes_per_step=2' if loop.gather == 'passes' else ''}",
        "ddp": "",
        "strategy": ", strategy='ddp'",
        "fsdp": ", strategy='fsdp'",
        "logical": f", logical={micro} * size",
    }[loop.way] + OPTIONS[loop.option]
    scaler = loop.amp != "no"
    wrapped = options if loop.way in ("distributed", "sum") else ""
    step_of = lambda argument: (  # noqa: E731
        f"for one in optimizers: {'scaler.step(one)' if scaler else f'one.step({argument})'}"
        + ("\nscaler.update()" if scaler else "")
    )
    unscale = "for one in optimizers: scaler.unscale_(one)\n" if loop.amp == "unscale" else ""
    clip = CLIPS[loop.clip]
    if loop.gather == "accumulate":
        # On ranks the loop steps after each micro-batch; the last one of a step counts.
        end = f"{unscale}{clip or 'pass'}\n{step_of('')}\nzero()"
        whole = (
            f"for x, y in micros:\n{indent(LOSSES[loop.loss], '    ')}\n    if ring:\n{indent(end, '        ')}\n"
            f"if not ring:\n{indent(end, '    ')}"
        )
    elif loop.closure:
        body = f"zero()\n{LOSSES[loop.loss]}\n{clip or 'pass'}\nreturn last[0]"
        whole = f"x, y = micros[0]\ndef closure():\n{indent(body, '    ')}\n{step_of('closure')}"
    elif "SAM" in loop.optimizers:
        inner = f"zero()\n{LOSSES[loop.loss]}\n{clip or 'pass'}\n"
        whole = (
            f"x, y = micros[0]\n{inner}for one in optimizers: one.first_step()\n"
            f"{inner}for one in optimizers: one.second_step()"
        )
    else:
        context = "ring and n == 0 and hasattr(quiet, 'no_sync')" if loop.gather == "no_sync" else "False"
        whole = (
            "zero()\nfor n, (x, y) in enumerate(micros):\n"
            f"    with quiet_all() if {context} else contextlib.nullcontext():\n"
            + indent(LOSSES[loop.loss], "        ")
            + f"\n{unscale}{clip or 'pass'}\n{step_of('')}"
        )
    plateau = "schedule.step(shared(float(last[0].detach())))" if loop.schedule == "Plateau" else "schedule.step()"
    read = "micros = [next(left) for _ in range(MICRO)]; x, y = micros[0]"
    if loop.way == "logical" and micro > 1:
        read = "micros = (next(left) for _ in range(MICRO))"  # the next batch begins the next turn
    mean = "" if loop.gather in ("no", "passes", "accumulate") else " / 2"
    alone = "1"
    if loop.gather == "accumulate":
        alone = "(1 if ring else 0.5)"
    if loop.way == "sum":
        alone = "(1 if ring else size)"
    return f"""import contextlib, copy, threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
import lion_pytorch, pytorch_optimizer, schedulefree
ROWS, MICRO, STEPS = 4, {micro}, 6

class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {{"lr": lr}})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups
    def named(self): return [p for group in self.param_groups for p in group["params"] if p.grad is not None]
    @torch.no_grad()
    def first_step(self):
        norm = nn.utils.get_total_norm([p.grad for p in self.named()])
        for p in self.named():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad / (norm + 1e-9), alpha=0.05)
    @torch.no_grad()
    def second_step(self):
        for p in self.named():
            if "old" in self.state[p]: p.copy_(self.state[p]["old"])
        self.base.step()
    def step(self, closure=None): raise NotImplementedError

class Model(nn.Module):
    def __init__(self, ring):
        super().__init__()
        self.ring, self.reentrant = ring, {loop.reentrant}
{indent(declare, "        ")}
        self.head = nn.Linear(3, 3)
    def forward(self, x):
        first, out = x, torch.zeros(len(x), 3, dtype=x.dtype)
{indent(forward, "        ")}
        out = self.head(torch.tanh(out))
        return out + self.more(first) if hasattr(self, "more") else out
    def __deepcopy__(self, memo):
        ring, self.ring = self.ring, None
        try:
            kind = self.__class__.__new__(self.__class__)
            memo[id(self)] = kind
            kind.__dict__.update(copy.deepcopy(self.__dict__, memo))
        finally: self.ring = ring
        kind.ring = ring
        return kind

def seeded(model):
    generator = torch.Generator().manual_seed({loop.seed})
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.double) / 2
            p.copy_(drawn + 0.3 if not p.is_complex() else torch.complex(drawn, drawn / 3))

def train(ring, rank, size):
    model = Model(ring).double()
    seeded(model)
    own = lambda model: list(model.parameters())
    trained = list(model.parameters())[: {-1 if loop.rest else None}]
    shares = [trained[n::{groups}] + (trained[:1] if n and {loop.shared} else []) for n in range({groups})]
    optimizers = [{made}]
    for one in optimizers:
        if hasattr(one, "train"): one.train()
    if {loop.begun}:  # before `prepare`
        for p in trained: p.grad = torch.full_like(p, 0.1) if p.requires_grad else None
        for one in optimizers: one.step()
        for p in trained: p.grad = None
    schedules = {schedule if SCHEDULES[loop.schedule] else "[]"}
    generator = torch.Generator().manual_seed({loop.seed} + 1)
    total = ROWS * size * MICRO * STEPS
    data = TensorDataset(torch.randn(total, 6, generator=generator, dtype=torch.double),
                         torch.randn(total, 3, generator=generator, dtype=torch.double))
    kind = {loop.loader!r}
    loader = DataLoader(data, batch_size=ROWS * (1 if ring else size), shuffle=kind == "shuffled",
                        generator=torch.Generator().manual_seed(3))
    quiet = model
    if ring:
        if {loop.way in ("prepare", "strategy", "fsdp", "logical")}:
            prepared = ring.prepare(model, *optimizers, *schedules, loader{options if loop.way != "ddp" else ""})
            model, optimizers = prepared[0], list(prepared[1 : 1 + len(optimizers)])
            schedules, loader = list(prepared[1 + len(optimizers) : -1]), prepared[-1]
            quiet = optimizers[0] if {loop.way not in ("strategy", "fsdp")} else model
        elif {loop.way!r} == "ddp":
            loader = ring.prepare(loader)
            ring.process_group()
            model = quiet = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:
            loader = ring.prepare(loader)
            names = {{p: name for name, p in model.named_parameters()}}
            optimizers = [ring.DistributedOptimizer(one, named_parameters=[
                (names.get(p, "other"), p) for g in one.param_groups for p in g["params"]]{wrapped})
                for one in optimizers]
            quiet = optimizers[0]
    def again(model, optimizers, schedules):
        made = ring.prepare(model, *optimizers, *schedules{options})
        optimizers, schedules = list(made[1 : 1 + len(optimizers)]), list(made[1 + len(optimizers) :])
        return made[0], optimizers, schedules, optimizers[0] if {loop.way not in ("strategy", "fsdp")} else made[0]
    def quiet_all():
        stack = contextlib.ExitStack()
        for one in optimizers if quiet is not model else [model]: stack.enter_context(one.no_sync())
        return stack
    def batches():
        if kind == "slices":
            for at in range(0, total, ROWS * size):
                rows = slice(at, at + ROWS * size)
                x, y = data.tensors[0][rows], data.tensors[1][rows]
                yield (x[rank::size], y[rank::size]) if ring else (x, y)
        else: yield from loader
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    factor = {alone}{mean}
    last = [None]
    def loss_of(out, y):
        return nn.functional.mse_loss(out, y)
    def backward(loss, **options):
        last[0] = loss
        loss = loss * factor
        ({"scaler.scale(loss)" if scaler else "loss"}).backward(**options)
    def shared(number):
        return ring.allreduce(torch.tensor(number, dtype=torch.double)).item() if ring else number
    def zero():
        {indent(ZEROS[loop.zero], "        ").strip()}
    ema = torch.optim.swa_utils.AveragedModel(Ema(model)) if {loop.ema} else None
    norms, left = [], batches()
    for step in range(STEPS):
        {read}
{indent(MIDDLES[loop.middle], "        ") or "        pass"}
{indent(whole, "        ")}
        for schedule in schedules: {plateau}
        if ema is not None: ema.update_parameters(Ema(model))
    found = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]
    found += [b.detach().clone() for b in model.buffers() if b.is_floating_point()]
    if ema is not None: found += [p.detach().clone() for p in ema.parameters()]
    return found, [norm for norm in norms if norm]

class Ema(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.weights = nn.ParameterList([p.detach().clone() for p in list(model.parameters())[:4]])

def distance(one, other):
    (ours, our_norms), (theirs, their_norms) = one, other
    assert len(ours) == len(theirs) and len(our_norms) == len(their_norms), (len(our_norms), len(their_norms))
    worst = 0.0
    for a, b in zip((*ours, torch.tensor(our_norms).double()), (*theirs, torch.tensor(their_norms).double())):
        if a.numel(): worst = max(worst, float(((a - b).abs() / (1 + b.abs())).max().nan_to_num(9.0)))
    return worst

if __name__ == "__main__":
    import os
    os.environ["RING_OVERLAP"] = {loop.overlap!r}
    import ring_notebook.torch as ring
    ring.init()
    print("distance to one process:", distance(train(ring, ring.rank(), ring.size()), train(None, 0, ring.size())))
"""
