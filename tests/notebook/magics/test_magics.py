"""The magics in a real kernel: what a user types and what the notebook then shows."""

from __future__ import annotations

import html
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.waiting import until
from notebook.kernel import ANSI, Notebook
from ring_notebook.notebook.run.timeline import MIME

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    started = Notebook(tmp_path_factory.mktemp("notebook"))
    started.run("%load_ext ring_notebook")
    yield started
    started.close()


def test_before_there_is_a_cluster(notebook: Notebook) -> None:
    name, shown = notebook.error("%ring status")
    assert name == "ClusterError"
    assert shown == "ClusterError: there is no cluster; `%ring start` starts one"


INTERRUPTED = "import os, signal, threading\nthreading.Timer({}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"


def test_an_interrupted_start_says_what_was_ended(notebook: Notebook) -> None:
    for cell in ("%ring start -n 2", "get_ipython().run_cell_magic('ringtrain', '-n 2', 'pass')"):
        name, shown = notebook.error(f"{INTERRUPTED.format(0.1)}{cell}")
        assert name == "KeyboardInterrupt"
        said = r"interrupted 0\.\d s after the start of 2 engines, which have been ended: no cluster runs. "
        assert re.fullmatch(f"KeyboardInterrupt: {said}Execute the cell again to start one", shown), shown
        family = psutil.Process(notebook.pid).children(recursive=True)
        assert not [one for one in family if "ipcontroller" in " ".join(one.cmdline())]
        assert notebook.error("%ring status")[1] == "ClusterError: there is no cluster; `%ring start` starts one"


def test_a_syntax_error_costs_no_cluster(notebook: Notebook) -> None:
    name, shown = notebook.error("%%ringtrain\nx = 1\nif x\n    pass")
    assert name == "CellSyntaxError"
    assert "Cell, line 3" in shown
    assert "ring_notebook" not in shown
    name, shown = notebook.error("%%ringtrain\nfor x in range(3):\n    pass\nreturn x")
    assert name == "CellSyntaxError"
    assert "Cell, line 4\n    return x\n" in shown
    assert "'return' outside function" in shown


def test_the_first_cell_starts_a_cluster_and_says_why(notebook: Notebook) -> None:
    text = notebook.text("%%ringtrain\nfrom ring_notebook.core import world\nprint('rank', world.current().rank)")
    assert re.search(r"Started \d+ engines \(one per core, \d+ found, no GPU.*\) in \d+\.\d s", text)
    assert "rank 0" in text
    assert "rank 1" in text


def test_a_cell_keeps_the_pages_of_tensors_that_it_frees(notebook: Notebook) -> None:
    text = notebook.text(
        "%%ringtrain\nimport torch, resource\nfound = []\n"
        "for _ in range(20):\n"  # the first ones fill gaps in the heap
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(1 << 24)\n"
        "    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "print('new pages each time:', min(found[10:]) > 8192)\n"
        "del before, found, torch, resource"
    )
    assert "[0-1] new pages each time: False" in text


def test_start_says_that_one_runs(notebook: Notebook) -> None:
    assert "engines is running already" in notebook.text("%ring start")
    for line, restart in (("%ring start -n 99", True), ("%ring start --keep", False)):
        shown = notebook.error(line)[1]
        assert "engines is running; stop it first: `%ring stop`" in shown
        assert ("or change its size: `%ring restart -n 99`" in shown) is restart


def test_help_of_all_of_a_command_and_of_cells(notebook: Notebook) -> None:
    said = notebook.text("%ring help")
    assert said == notebook.text("%ring") == notebook.text("%ring --help")
    assert re.search(r"^  start +start a cluster", said, re.MULTILINE)
    assert re.search(r"^ +-t, --rank RANK +the rank to copy from; by default 0$", said, re.MULTILINE)
    assert "%%ringtrain: run the cell on every rank; starts a cluster when none is running." in said
    assert "%%ringscale 1,2,4: " in said
    said = notebook.text("%ring start --help")
    assert notebook.text("%ring help start") == said
    assert ("--keep" in said, "--rank" in said) == (True, False)
    said = notebook.text("%%ringtrain --help")
    assert re.search(r"^  --plot loss,acc +metrics to chart; loss\+val_loss: both in one$", said, re.MULTILINE)
    assert said == notebook.text("%%ringtrain -n 1 -h\nraise ValueError")
    assert said == notebook.text("%ring help ringtrain") == notebook.text("%ring help %%ringtrain")
    documented = notebook.text("print(get_ipython().find_magic('ringtrain', 'cell').__doc__)")
    assert documented.strip() == said.strip()


def test_status_lists_the_engines(notebook: Notebook) -> None:
    text = notebook.text("%ring status")
    assert "rank" in text
    assert text.count("idle") >= 2
    notebook.run("%%ringtrain --background --name told\nimport time\nwhile True: time.sleep(0.1)")
    text = notebook.text("%ring status")
    assert text.count("in run told") == 2
    assert "`%ring attach` shows the panel" in text
    notebook.run("%ring stop --runs")


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("%%ringtrain -n 99\npass", "ClusterError", "expected 1 to 2 ranks, got 99; `%ring restart -n 99`"),
        ("%%ringtrain --bogus\npass", "UsageError", "unrecognized arguments: --bogus"),
        ("%%ringtrain -n two\npass", "UsageError", "argument -n: expected an integer of at least 1, got 'two'"),
        ("%%ringtrain -t 0,7\npass", "ClusterError", "no rank 7: this cluster has ranks 0 to 1"),
        ("%%ringtrain -t 2-1\npass", "UsageError", "argument -t/--ranks: expected ranks such as 0,2-3, got '2-1'"),
        ("%%ringtrain -n 1 -t 0\npass", "UsageError", "argument -t/--ranks: not allowed with argument -n"),
        ("%ring start -n 0", "UsageError", "argument -n: expected an integer of at least 1, got '0'"),
        ("%ring start --hosts a:x", "UsageError", "argument --hosts: cannot read host 'a:x'"),
        ("%ring export 'train.py", "UsageError", "No closing quotation"),
        ("%ring export /no/such/folder/train.py", "FileNotFoundError", "/no/such/folder/train.py"),
        ("%%ringscale 1,99\nprint('in vain')", "ClusterError", "expected 1 to 2 ranks, got 99; `%ring restart -n 99`"),
        ("%ring bogus", "UsageError", "unrecognized arguments: bogus"),
        ("%ring pull no_such_name -t 1", "ClusterError", "no variable 'no_such_name' on rank 1, which has none yet"),
        ("%ring pull kept -t 99", "ClusterError", "there is no rank 99"),
        ("%ring push no_such_name", "RingError", "no variable no_such_name in this notebook"),
    ],
)
def test_bad_input_is_one_line(notebook: Notebook, line: str, name: str, text: str) -> None:
    notebook.run("%ring start -n 2")  # an error where an earlier test has done so
    notebook.run("%%ringtrain\npass")  # what %ring export takes
    outputs = notebook.run(line)
    shown = ANSI.sub("", "".join(o.get("text", "") + "\n".join(o.get("traceback", [])) for o in outputs)).strip()
    assert text in shown
    assert shown.startswith(name)
    assert len(shown.splitlines()) == 1


def test_a_cell_on_some_ranks(notebook: Notebook) -> None:
    """They count from 0, an error and an interrupt reach them and not the others, and the next cell is for all."""
    notebook.run("%%ringtrain\nmark = 'engine ' + str(ring.rank())")
    text = notebook.text("%%ringtrain -t 1\nprint(mark, 'is rank', ring.rank(), 'of', ring.size())")
    assert "engine 1 is rank 0 of 1" in text
    assert "1 rank (rank 1 of the cluster)" in text.splitlines()[0]
    name, shown = notebook.error("%%ringtrain -t 1\nimport time\ntime.sleep(100)", interrupt_when=lambda: True)
    assert name == "KeyboardInterrupt"
    name, shown = notebook.error("%%ringtrain -t 1\ndef f(x):\n    return 1 / x\nf(0)")
    assert name == "ZeroDivisionError"
    assert shown.count("Traceback") == 1
    assert "Cell, line 4, in <module>" in shown
    assert "Cell, line 3, in f" in shown
    assert "ipyparallel" not in shown
    assert "all 2 of them" in notebook.text("%%ringtrain\nring.barrier()\nprint('all', ring.size(), 'of them')")


@pytest.mark.parametrize("line", ["%%time\nprint('size', ring.size())", "%time print('size', ring.size())"])
def test_ring_is_there_for_a_cell_that_names_it_in_a_magic(notebook: Notebook, line: str) -> None:
    notebook.run("%%ringtrain\nring.barrier(); del ring")
    assert "size 2" in notebook.text(f"%%ringtrain -n 2\n{line}")


def test_a_metric_that_never_came_is_named(notebook: Notebook) -> None:
    cell = "from ring_notebook.core.metrics import log\nlog(loss=1)"
    assert "--plot los: not logged; the run logged loss." in notebook.text(f"%%ringtrain --plot los,loss\n{cell}")


def test_out_holds_the_run(notebook: Notebook) -> None:
    notebook.run(
        "%%ringtrain --name first --out run\nfrom ring_notebook.core.metrics import log\n"
        "for i in range(5): log(loss=1 / (i + 1), samples=8)"
    )
    assert "ok" in notebook.text("run.status")
    assert "10" in notebook.text("len(run.metrics)")
    assert "80" in notebook.text("run.summary['samples']")
    (shown,) = notebook.run("run")
    assert shown["data"]["text/plain"] == "<Run first on 2 ranks: ok>"
    assert "data-tip='step 0&#10;rank 0" in shown["data"]["text/html"], "no chart of the loss"


SLOW = """%%ringtrain --name slow --timeline --out run
import time, torch
for step in range(20):
    ring.allreduce(torch.ones(1000), name="gradient")
    if ring.rank() == 1:
        time.sleep(0.1)
"""


def test_a_timeline_says_why_it_is_slow(notebook: Notebook) -> None:
    outputs = notebook.run(SLOW)
    text = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert re.search(
        r"Rank 1 is (over )?[\d.]+x slower in sleeping or waiting outside of collectives; the others", text
    )
    (chart,) = [output["data"][MIME] for output in outputs if MIME in output.get("data", {})]
    waits = [bar for bar in chart["data"]["values"] if bar.get("for") == 1]
    assert len(waits) >= 10  # all but the first, unless a busy machine has held up rank 0 for longer
    assert {(bar["rank"], bar["phase"], bar["what"]) for bar in waits} == {(0, "waiting", "allreduce gradient")}
    assert "gradient" in notebook.text("print(run.timeline().path.read_text())")
    shares = json.loads(notebook.text("import json; print(json.dumps(run.summary['ranks']))"))
    assert shares[0]["communication"] > shares[1]["communication"] > 0


def test_the_hyper_parameters_of_a_cell_are_recorded(notebook: Notebook) -> None:
    notebook.run(
        """%%ringtrain --out run --name tuned
import torch
epochs = 3
model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
ring.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2), accumulate=2)
ring.prepare(torch.utils.data.DataLoader(data, batch_size=4))  # what it is validated with
ring.log_params(depth=2, lr="by hand")"""
    )
    params = json.loads(notebook.text("import json; print(json.dumps(run.params))"))
    own = {"optimizer": "SGD", "lr": "by hand", "momentum": 0.5, "batch_size": 2, "accumulate": 2}
    assert params == {"epochs": 3, "depth": 2, **own}
    assert "tuned: kept" in notebook.text("%ring runs tag tuned kept")
    titles, row, *_ = notebook.text("%ring runs --where kept").splitlines()
    assert row[titles.index("accumulate")] == "2"


def test_push_and_pull(notebook: Notebook) -> None:
    name, shown = notebook.error("shared = None\nget_ipython().run_cell_magic('ringtrain', '', 'shared')")
    assert name == "NameError"
    assert "shared is a variable of the notebook, and ranks have their own: `%ring push shared` copies it" in shown
    assert "Pushed shared to 2 ranks." in notebook.text("shared = [1, 2]\n%ring push shared")
    notebook.run("%%ringtrain\nkept = {'sum': sum(shared)}")
    assert "dict of 1" in notebook.text("%ring pull kept")
    assert "{'sum': 3}" in notebook.text("kept")


def test_an_interrupt_ends_the_cell_and_nothing_else(notebook: Notebook, tmp_path: Path) -> None:
    begins = f"kept = 7; pathlib.Path('{tmp_path}', str(ring.rank())).touch()"
    name, shown = notebook.error(
        f"%%ringtrain\nimport pathlib, time\n{begins}\ntime.sleep(60)",
        interrupt_when=lambda: len(list(tmp_path.iterdir())) == 2,
    )
    assert name == "KeyboardInterrupt"
    assert "stopped at line 4 of the cell" in shown
    notebook.text("%%ringtrain\nassert kept == 7")


def test_in_the_background_other_cells_run_meanwhile(notebook: Notebook, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    notebook.run(
        "%%ringtrain --background --out run\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path('{enough}').exists(): time.sleep(0.01)\nkept = 8"
    )
    assert "running" in notebook.text("run.status")
    shown = notebook.error("%ring pull kept")[1]
    assert "is in progress (rank 0 " in shown
    assert "stop it with `%ring stop --runs`" in shown
    enough.touch()
    assert "ok" in notebook.text("run.wait().status")
    notebook.text("%%ringtrain\nassert kept == 8")


def test_what_is_saved_while_a_run_goes_on_says_how_to_see_it(notebook: Notebook) -> None:
    outputs = notebook.run("%%ringtrain --background --name going --out going\nimport time; time.sleep(60)")
    picture, panel = outputs[-2:]  # after the line of a cluster that starts
    for shown in (picture["data"]["text/plain"], picture["data"]["text/html"]):
        assert (
            "While its cluster runs, %ring attach shows it, here or in another notebook; a cluster ends with" in shown
        )
        headline = "running · going · 2 ranks", "● last state seen · going · 2 ranks"
        assert re.sub("<style>.*</style>|<.*?>", "", shown, flags=re.DOTALL).strip().startswith(headline), shown
    assert WIDGET in panel["data"]
    notebook.error("going.stop()\ngoing.wait()")
    assert "%ring attach" not in picture["data"]["text/plain"]
    assert "interrupted · going" in picture["data"]["text/plain"]
    assert WIDGET not in panel["data"]


@pytest.mark.parametrize(
    ("line", "said"), [("{}['missing_key']", "KeyError: 'missing_key'"), ("assert ring.rank() == 0", "AssertionError")]
)
def test_in_the_background_a_failure_is_shown_as_a_cell_shows_it(notebook: Notebook, line: str, said: str) -> None:
    cell = "import pathlib, time\nwhile not pathlib.Path('fail').exists(): time.sleep(0.02)\n"
    cell += f"if ring.rank() == 1:\n    {line}"
    panel = notebook.run(f"%%ringtrain --background --name fails --out fails\n{cell}")[0]
    # In one cell, because what a kernel shows between two cells does not reach this notebook.
    name, raised = notebook.error("import pathlib; pathlib.Path('fail').touch()\nfails.wait()")
    assert name == said.partition(":")[0]
    notebook.run("pathlib.Path('fail').unlink()")
    for shown in (panel["data"]["text/plain"], html.unescape(panel["data"]["text/html"])):
        for part in ("Traceback (most recent call last)", "Cell, line 5", line, said, "raised on rank 1"):
            assert part in shown
            assert part in raised
    in_a_line = notebook.text("print(fails.state()['error'])")
    assert in_a_line == f"{said}{': ' + line if said == 'AssertionError' else ''} (rank 1, line 5)\n"
    assert notebook.text("print(fails.summary['error'])") == in_a_line


def test_a_run_in_the_background_can_be_stopped(notebook: Notebook) -> None:
    notebook.run("%%ringtrain --background --out run\nimport time\ntime.sleep(60)")
    assert notebook.text("print(run.stop(), run.status)") == "True interrupted\n"
    notebook.text("%%ringtrain\npass")
    assert notebook.error("run.wait()")[0] == "KeyboardInterrupt"
    notebook.run("%%ringtrain --background --name second\nimport time\ntime.sleep(60)")
    assert "Run second has ended." in notebook.text("%ring stop --runs")
    assert "No run is in progress." in notebook.text("%ring stop --runs")


def test_runs_are_listed_and_compared(notebook: Notebook) -> None:
    cell = "from ring_notebook.core.metrics import log\nfor i in range(9): log(loss=1 / (i + 1))"
    notebook.run(f"%%ringtrain --name slow\n{cell}")
    notebook.run(f"%%ringtrain --name fast\n{cell.replace('1 / ', '2 / ')}")  # what is equal in all runs is folded
    listed = notebook.text("%ring runs")
    assert listed.index("fast") < listed.index("slow")
    titles, row, *_ = listed.splitlines()
    assert row[titles.index("loss") :].startswith("0.2222")
    (figure,) = notebook.run("%ring runs compare slow fast")
    assert "loss" in figure["data"]["text/html"]
    assert "no run 'nothing'" in notebook.error("%ring runs compare slow nothing")[1]
    (figure,) = notebook.run("%ring plot -x time loss+loss slow fast")
    assert re.findall("<img alt='([^:]+):", figure["data"]["text/html"]) == ["loss+loss over seconds"]
    assert "loss over step" in notebook.run("%ring plot loss")[0]["data"]["text/html"]
    assert "no metric 'acc'; it logged: loss" in notebook.error("%ring plot acc")[1]


def test_export_writes_the_last_cell_or_a_named_one(notebook: Notebook) -> None:
    notebook.run("%%ringtrain --name exported\nring.log(loss=1); print('exported')")
    text = notebook.text("%ring export train.py\nprint(open('train.py').read())")
    assert text.startswith("Wrote the cell of run exported to train.py. Run it: ringrun -np 2 python train.py")
    assert "print('exported')" in text
    notebook.run("%%ringtrain --name looked\nprint('at what was trained')")
    assert notebook.text("%ring export train.py").startswith("Wrote the cell of run exported to train.py.")
    assert "print('at what was trained')" in notebook.text(
        "%ring export train.py looked\nprint(open('train.py').read())"
    )
    assert "print('exported')" in notebook.text("%ring export train.py exported\nprint(open('train.py').read())")
    name, shown = notebook.error("%ring export train.py nosuchrun")
    assert (name, shown.partition(";")[0][:32]) == ("RingError", "RingError: no run 'nosuchrun' in")


def test_the_same_cell_at_several_sizes(notebook: Notebook) -> None:
    outputs = notebook.run(
        "%%ringscale 1,2 --repeat 2 --warmup 2 --weak --csv scale.csv --out scaled --predict 8 --link 25Gbit\n"
        "import time\n"
        "from ring_notebook.core.metrics import log\n"
        "for step in range(5): time.sleep(0.2); log(samples=100)"
    )
    table = outputs[-1]["data"]["text/plain"].splitlines()
    assert table[0].split()[:5] == ["ranks", "seconds", "global", "batch", "samples/s"]
    parts = ["compute", "asleep", "loading", "moving", "waiting"]
    shown = table[0].replace("off core", "")  # of a busy machine
    assert shown.split()[5:] == ["spread", "speedup", "efficiency", *parts]
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]
    assert [line.split()[2] for line in table[1:3]] == ["100", "200"]
    rate, speedup = ([float(line.split()[column].replace(",", "")) for line in table[1:3]] for column in (3, 5))
    assert speedup == pytest.approx([1.0, rate[1] / rate[0]], abs=0.1)
    assert "Weak scaling: 100 samples a rank." in table
    assert table[3].startswith("8 predicted  ")
    assert len(notebook.text("print(open('scale.csv').read())").splitlines()) == 5
    assert notebook.text("print([point.ranks for point in scaled.points])") == "[1, 2, 8]\n"
    assert (
        "--warmup 9; let it make more"
        in notebook.error(
            "%%ringscale 1,2 --warmup 9\nfrom ring_notebook.core.metrics import log\n"
            "for _ in range(3): time.sleep(0.01); log(samples=1)"
        )[1]
    )
    assert "not allowed with" in notebook.run("%%ringscale 1,2 --weak --strong\npass")[0]["text"]
    assert "expected numbers of ranks" in notebook.run("%%ringscale 1,x\npass")[0]["text"]


@pytest.mark.parametrize("stopped", [False, True], ids=["error", "stop"])
def test_what_was_measured_before_an_error_is_kept(notebook: Notebook, tmp_path: Path, stopped: bool) -> None:
    begun = tmp_path / "begun"
    wrong = f"open({str(begun)!r}, 'w').close(); time.sleep(100)" if stopped else "raise MemoryError('no more')"
    outputs = notebook.run(
        f"%%ringscale 1,2 --csv {tmp_path}/kept.csv --out kept\n"
        "import time\n"
        "from ring_notebook.core.metrics import log\n"
        f"if ring.size() == 2: {wrong}\n"
        "for step in range(3): time.sleep(0.05); log(samples=100)",
        interrupt_when=begun.exists if stopped else None,
    )
    error = next(one for one in outputs if one["output_type"] == "error")
    assert error["ename"] == ("KeyboardInterrupt" if stopped else "MemoryError")
    table = outputs[outputs.index(error) - 1]["data"]["text/plain"].splitlines()
    assert [line.split()[0] for line in table[:2]] == ["ranks", "1"]
    assert table[-1] == "Measured before the error: 1 run of 2."
    assert [line.split(",")[0] for line in (tmp_path / "kept.csv").read_text().splitlines()] == ["ranks", "1"]
    assert notebook.text("print([point.ranks for point in kept.points])") == "[1]\n"


def test_a_cell_imports_horovod_when_asked_and_the_next_one_does_not(notebook: Notebook) -> None:
    assert "sum 3" in notebook.text(
        "%%ringtrain -n 2 --horovod --name ported\nimport horovod.torch as hvd, torch\nhvd.init()\n"
        "print('sum', int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum)))"
    )
    name, shown = notebook.error("%%ringtrain\nimport horovod.torch")
    assert name == "ModuleNotFoundError"
    assert "No module named 'horovod'; `%%ringtrain --horovod` makes it mean Ring Notebook" in shown
    assert "the same" in notebook.text(
        "%%ringtrain -n 2 --horovod\nimport horovod.torch\nif horovod.torch is hvd: print('the same')"
    )
    notebook.run("%ring export ported.py ported")
    assert "\nring_notebook.as_horovod()\n" in notebook.text("print(open('ported.py').read())")


@pytest.mark.slow
def test_help_on_names_of_the_ranks(notebook: Notebook) -> None:
    notebook.run("%%ringtrain\ndef of_ranks(a, b=2):\n    'Only there.'\nhere_too = 1j\nring.barrier()")
    notebook.run("here_too = 2j")
    assert "Signature: of_ranks(a, b=2)\nDocstring:\nOnly there." in notebook.inspect("of_ranks")
    shown = notebook.inspect("%%ringtrain\nx = ring.allreduce")
    assert "Horovod: ``allreduce``" in shown
    assert "ring.elastic.TorchState(" in notebook.inspect("ring.elastic.TorchState(")
    assert "2j" in notebook.inspect("here_too")
    assert notebook.inspect("nothing_of_the_kind") == notebook.inspect("ring.nothing_of_the_kind") == ""


def test_ring_is_explained_in_every_cell_and_runs_on_the_ranks_alone(notebook: Notebook) -> None:
    shown = notebook.inspect("ring.prepare")
    assert "ring.prepare(" in shown
    assert "Make a single-process training loop data parallel" in shown
    # Of the ranks, or of the notebook itself where these are too busy to answer.
    assert any(name.endswith("broadcast_object") for name in notebook.complete("ring.broadcast_o"))
    name, text = notebook.error("ring.rank()")
    assert name == "RingError"
    assert "ring.rank() runs on the ranks, and this cell runs in the notebook; put %%ringtrain on its" in text
    assert "Make a single-process training loop data parallel" in notebook.text("%%ringtrain -n 1\nring.prepare?")
    assert "no name in 3" in notebook.text("ring = 3\nprint('no name in', ring)\ndel ring")


def test_names_of_runs_complete(notebook: Notebook) -> None:
    notebook.run("%%ringtrain -n 1 --name a_run_to_find\npass")
    assert "a_run_to_find" in notebook.complete("%ring runs compare a_run")
    assert "a_run_to_find" in notebook.complete("%ring export train.py a_r")
    assert "a_run_to_find" not in notebook.complete("%ring pull a_r")


def test_names_of_the_ranks_complete_in_their_cells_only(notebook: Notebook) -> None:
    notebook.run("%%ringtrain\nring.barrier()\nmomentum_of_ranks = 1j")
    for cell, there in (("%%ringtrain\nmoment", True), ("%ring pull moment", True), ("moment", False)):
        assert ("momentum_of_ranks" in notebook.complete(cell)) is there, cell
    assert "momentum_of_ranks" in notebook.complete("%ring pull ")
    assert "momentum_of_ranks.imag" in notebook.complete("%%ringtrain\nx = f(momentum_of_ranks.im")
    assert "ring.allreduce" in notebook.complete("%%ringtrain\nring.allr")
    assert "ring.elastic.TorchState" in notebook.complete("%%ringtrain\nring.elastic.")
    for cell in ("ring.allr", "%%ringtrain\nring.allr", "%%ringtrain\nrin"):
        names = notebook.complete(cell)
        assert len(names) == len(set(names)), "each name once"


def test_commands_and_options_complete(notebook: Notebook) -> None:
    assert notebook.complete("%ring st") == ["stacks", "start", "status", "stop"]
    assert notebook.complete("x = 1\n%ring start --keep --h") == ["--here", "--hosts"]
    assert notebook.complete("%%ringtrain --time") == ["--timeline", "--timeout"]
    assert "--plot" not in notebook.complete("%%ringtrain --name --pl")


@pytest.mark.slow
def test_restart_runs_the_setup_cells_again(notebook: Notebook) -> None:
    notebook.run("%%ringtrain --setup\nprepared = 1")
    assert notebook.error("%%ringtrain --setup\ndoubled = 2 * prepaired")[0] == "NameError"
    notebook.run("%%ringtrain --setup\ndoubled = 2 * prepared")
    # As a notebook does that tells its kernel which cell it is.
    notebook.run("get_ipython().get_parent = lambda: {'metadata': {'cellId': 'edited'}}")
    notebook.run("%%ringtrain --setup\nversions = [1]")
    notebook.run("%%ringtrain --setup\nversions = [*globals().get('versions', []), 2]")
    notebook.run("del get_ipython().get_parent")
    for _ in range(2):
        assert "Ran 3 set-up cells again" in notebook.text("%ring restart --rerun")
        notebook.text("%%ringtrain\nassert (prepared, doubled, versions) == (1, 2, [2])")


@pytest.mark.slow
def test_heal_starts_a_dead_rank_with_its_set_up_cells(notebook: Notebook) -> None:
    """The cluster is without MPI from here on."""
    notebook.run("%%ringtrain --setup\nimport os\nbase = 10 * ring.rank(), ring.size()")
    notebook.run("%%ringtrain\nkept = 7")
    *report, error = notebook.run("%%ringtrain\nif ring.rank() == 1: os._exit(3)\nring.barrier()")
    assert error["ename"] == "ClusterError"
    assert "\n".join(error["traceback"]).count(reason := "exited with code 3") == 1 > str(report).count(reason)
    outputs = str(notebook.run("%ring status"))
    assert "died" in outputs
    assert "MiB" in outputs
    told = json.loads(notebook.text("%ring status --json"))
    assert [(rank["state"], rank["memory"] is None) for rank in told["ranks"]] == [("idle", False), ("died", True)]
    assert "rank 1 has died; `%ring heal` starts it again" in notebook.error("%%ringtrain\npass")[1]
    shown = notebook.error(f"{INTERRUPTED.format(0.05)}%ring heal")[1]
    assert "interrupted before the ranks had started; the cluster has 2 engines, `%ring heal` starts rank 1" in shown
    healed = notebook.text("%ring heal")
    assert "Started rank 1 again" in healed
    assert re.search(r"Ran \d+ set-up cells? on rank 1\.", healed)  # other tests have given theirs
    notebook.run("%%ringtrain\nassert base == (10 * ring.rank(), 2)\nassert (kept if ring.rank() == 0 else 7) == 7")
    assert notebook.text("%ring heal") == "No rank has died: 4 ranks live.\n"
    for line in ("%ring restart -n 1000000000", "%ring snapshots save ''"):
        assert "KeyError" not in notebook.error(line)[1]
    notebook.text("%%ringtrain -n 1\nassert kept == 7  # a start that is not allowed ends no cluster")
    grown = notebook.text("%ring resize 3")
    assert re.match(r"Started rank 2 in [\d.]+ s, without variables; the others keep theirs\.\n", grown)
    assert re.search(r"Ran \d+ set-up cells? on rank 2\.", grown)
    notebook.run("%%ringtrain\nassert base == (10 * ring.rank(), 3 if ring.rank() == 2 else 2)")
    assert notebook.text("%ring resize 2") == "Ended rank 2; the other 2 engines keep their variables.\n"
    notebook.run("%%ringtrain\nassert base == (10 * ring.rank(), ring.size())")


def test_stop(notebook: Notebook) -> None:
    ranks = json.loads(notebook.text("%ring status --json"))["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    while "died" not in notebook.text("%ring status"):
        pass
    notebook.run("%ring default on")
    said = notebook.text("%ring stop")
    assert said.startswith("Stopped 1 engine; rank 1 had died already.")
    assert "Cells run in this notebook again." in said
    assert notebook.text("print('plain')") == "plain\n"
    starts = psutil.Process(notebook.pid).children
    error = notebook.error("%ring start", interrupt_when=lambda: bool(starts()))[1]
    assert error.startswith("KeyboardInterrupt: interrupted ")
    assert "which have been ended: no cluster runs. Execute the cell again" in error
    assert "There is no cluster" in notebook.text("%ring stop")


@pytest.mark.slow
def test_the_doctor_looks_at_this_machine(notebook: Notebook) -> None:
    said = notebook.text("%ring doctor")
    assert re.search(r"^ok +core +compiled", said, re.MULTILINE)
    assert re.search(r"^ok +mpi +.*two ranks connected", said, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_that_ignores_the_stop_is_ended_and_started_again(notebook: Notebook) -> None:
    """By itself after the limit, or when the user asks for it; the other keeps its variables."""
    stubborn = "\n".join(
        [
            "import os, time",
            "kept = 7",
            "while ring.rank():",
            "    try: open('begun 1', 'w').close(); time.sleep(60)",
            "    except KeyboardInterrupt: pass",
            "open('begun 0', 'w').close(); time.sleep(60)",
        ]
    )
    folder = Path(notebook.text("import os; print(os.getcwd())").strip())

    def begun() -> bool:
        return len(list(folder.glob("begun *"))) == 2

    notebook.run("import os; os.environ['RING_STOP_LIMIT'] = '1'; from ring_notebook.config import config")
    notebook.run("config.cache_clear()")
    outputs = notebook.run(f"%%ringtrain\n{stubborn}", begun)
    assert "rank 1 was ended: it had not stopped 1 s after an interrupt" in str(outputs[-1])
    assert "Started rank 1 again" in str(outputs)
    for rank in range(2):
        (folder / f"begun {rank}").unlink()
    notebook.run(f"%%ringtrain --background\n{stubborn}")
    until(begun)
    assert "Started rank 1 again" in notebook.text("%ring restart --rank 1")
    notebook.run("%%ringtrain\nassert ring.rank() or kept == 7")
    notebook.run("del os.environ['RING_STOP_LIMIT']; config.cache_clear()")
