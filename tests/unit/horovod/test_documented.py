"""docs/horovod.md says of every name of Horovod's PyTorch modules what it does here, and of no other."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from pathlib import Path

import ring_notebook.torch as hvd
from ring_notebook.horovod.as_horovod import as_horovod
from ring_notebook.launch import horovod_run
from unit.horovod.horovod_names import THEIRS

TEXT = (Path(__file__).parents[3] / "docs" / "horovod.md").read_text()


def names(title: str, column: int = 0) -> list[str]:
    """The names in a column of the table below a heading that contains ``title``."""
    section = TEXT.split("## Every name")[1].split("\n## ")[0]
    [table] = [part for part in section.split("\n### ") if title in part.split("\n")[0]]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[column])]


def test_collectives_and_ranks() -> None:
    documented = names("mpi_ops")
    theirs = {*THEIRS["horovod.torch.mpi_ops"].split(), "Min", "Max", "Product", "HostsUpdatedInterrupt"}
    assert sorted(documented) == sorted(theirs)


def test_functions_and_optimizers() -> None:
    documented = names("horovod.torch.functions")
    modules = ("functions", "optimizer", "compression", "sync_batch_norm")
    theirs = {name for module in modules for name in THEIRS[f"horovod.torch.{module}"].split()}
    assert {name for name in documented if "." not in name} == theirs
    with as_horovod():
        wrapped = importlib.import_module("horovod.torch.optimizer")._DistributedOptimizer
    of_optimizers = [name.partition(".")[2] for name in documented if "." in name]
    assert of_optimizers
    assert [name for name in of_optimizers if name != "_parameter_names" and not hasattr(wrapped, name)] == []


def test_elastic() -> None:
    documented = names("horovod.torch.elastic")
    assert {name for name in documented if "." not in name} == {
        *THEIRS["horovod.torch.elastic"].split(),
        "State",
    } - {"sampler", "state"}
    for name in documented:
        assert callable(operator.attrgetter(name)(hvd.elastic))


def test_keywords_of_run() -> None:
    assert set(names("horovod.run")) == set(inspect.signature(horovod_run.run).parameters)


def test_common() -> None:
    documented = names("horovod.common")
    assert {f"horovod.common.{name}" for name in documented} == {
        name for name in THEIRS if name.startswith("horovod.common.")
    }
    with as_horovod():
        for module, row in zip(documented, TEXT.split("### `horovod.common`")[1].split("\n| `")[1:], strict=False):
            made = importlib.import_module(f"horovod.common.{module}")
            assert sorted(re.findall(r"`(\w+)`", row.split("|")[1])) == sorted(made.__all__)
