"""The house of docs/architecture.md, proven by reading every import: down only, and the islands apart."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from harness.trees import parsed

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "ring_notebook"
# Each room and the rooms below it that it may import; a room is a folder, named by its path in the package. `ground` is
# the modules that lie in the package itself, with the rooms of the ground floor; every room above may import it.
GROUND_FLOOR: dict[str, set[str]] = {
    "text": set(),
    "machine": {"text"},
    "protocol": {"text"},
    "analysis": {"machine", "text", "ground"},
}
ABOVE = """
files:
rank:
core: rank
api: files core
jax: core api
tensorflow: core api
tensorflow/elastic: core api tensorflow
keras: core api tensorflow
keras/elastic: core api keras
torch: core api
torch/collectives: core api torch
torch/steps: core api torch torch/collectives
torch/optimizer: core api torch torch/collectives torch/steps
torch/process_group: rank core api torch torch/collectives torch/steps
torch/training: files core api torch torch/collectives torch/steps torch/optimizer torch/process_group
torch/elastic: files core api torch torch/training
horovod:
horovod/path: horovod
engine: files rank core horovod
launch/connections: files rank
launch/supervisor: files rank launch/connections
launch/launchers: rank launch/supervisor
launch/remote: files rank launch/connections launch/supervisor launch/launchers
launch: files rank horovod launch/connections launch/supervisor launch/launchers launch/remote
notebook: rank
notebook/record: files notebook
notebook/panel/charts: notebook notebook/record
notebook/panel: notebook notebook/record notebook/panel/charts
notebook/run: files notebook notebook/record notebook/panel/charts notebook/panel
notebook/cluster: files rank launch/supervisor launch/launchers launch notebook notebook/record notebook/run
notebook/session: files launch notebook notebook/record notebook/run notebook/cluster
notebook/lab: files notebook notebook/record notebook/panel/charts notebook/panel notebook/run notebook/cluster
    notebook/session
notebook/magics/commands: files launch/launchers launch notebook notebook/record notebook/panel notebook/run
    notebook/cluster notebook/session notebook/lab
notebook/magics: notebook notebook/run notebook/cluster notebook/session notebook/magics/commands
"""
MAY_IMPORT = {"ground": {"ground"}, **GROUND_FLOOR} | {
    line.split(":")[0]: {*line.split(":")[1].split(), "ground"} for line in re.split(r"\n(?! )", ABOVE.strip())
}
# Files that may import one room more: the face of a package shows what lies in the rooms above its own.
EXCEPTIONS = {
    **{f"ring_notebook/{name}.py": {"launch", "launch/remote"} for name in ("dask", "k8s", "spark")},
    "ring_notebook/ray.py": {"launch", "launch/remote", "api", "rank"},
    "ring_notebook/torch/__init__.py": {
        "torch/collectives",
        "torch/optimizer",
        "torch/process_group",
        "torch/training",
        "torch/elastic",
    },
    "ring_notebook/torch/mpi_ops.py": {"torch/collectives"},
    "ring_notebook/tensorflow/__init__.py": {"tensorflow/elastic"},
    "ring_notebook/keras/__init__.py": {"keras/elastic"},
}
# Frameworks and the only rooms that may import them, with the rooms in these.
FRAMEWORKS = {
    "torch": {"torch"},
    "tensorflow": {"tensorflow"},
    "keras": {"keras"},
    "tf_keras": {"keras"},
    "jax": {"jax"},
    "mpi4py": {"core", "engine"},
    "ipyparallel": {"engine", "notebook"},
    "ipywidgets": {"notebook"},
    "ipecharts": {"notebook"},
    "ipylab": {"notebook"},
}
# Whatever their spelling, as words of their own or at the beginning of one (torchvision).
NAMES = ["torch", "tensorflow", "keras", "jax"]
FILES = sorted(PACKAGE.rglob("*.py"))
# It names every room and loads none, which test_import_weight proves.
FACE = "ring_notebook"


def modules_imported(source: str) -> Iterator[str]:
    """Every module that the source imports, wherever it does; ``from a import b`` gives a and a.b."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor they come from"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    """The room of a module or package of this package; its public face and what lies beside it is ground."""
    parts = module.split(".")[1:]
    while parts and "/".join(parts) not in MAY_IMPORT:
        parts.pop()
    return "/".join(parts) or "ground"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def violations(path: str, source: str) -> list[str]:
    """What a file at ``path`` (from the repository's root) imports and may not."""
    room = room_of(path.removesuffix(".py").replace("/", "."))
    allowed = MAY_IMPORT[room] | {room} | EXCEPTIONS.get(path, set())
    if "ground" in allowed:
        allowed |= set(GROUND_FLOOR)
    floor = room.split("/")[0]
    bad = []
    for module in modules_imported(source):
        top = module.split(".")[0]
        if (top == "ring_notebook" and room_of(module) not in allowed) or floor not in FRAMEWORKS.get(top, {floor}):
            bad.append(f"{path} ({room}) imports {module}")
    return bad


def test_imports_go_down_only() -> None:
    files = [path for path in FILES if path != PACKAGE / "__init__.py"]
    assert [line for path in files for line in violations(str(path.relative_to(ROOT)), path.read_text())] == []


def test_rooms_lie_above_one_another() -> None:
    """A room never imports one that may import it, however many rooms are in between."""
    TopologicalSorter({room: below - {room} for room, below in MAY_IMPORT.items()}).prepare()  # raises CycleError


def test_no_circles() -> None:
    """Of any two modules, one is above the other: imports within functions and for type checkers count too."""
    TopologicalSorter(graph({name_of(path): path.read_text() for path in FILES})).prepare()  # raises CycleError


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules of this package that each of ``sources`` (module: text) imports anywhere."""
    names = set(sources) - {FACE}
    return {name: names_imported(text, names) - {name} for name, text in sources.items() if name != FACE}


def names_imported(source: str, names: set[str]) -> set[str]:
    """Those of ``names`` that the source needs; ``from a import b`` needs a.b where that is a module, and else a."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {member if member in names else str(node.module) for member in members}
    return found & names


@pytest.mark.parametrize(
    "last",
    [
        "from ring_notebook.torch.a import thing",
        "def f():\n    from ring_notebook.torch import a",
        "if TYPE_CHECKING:\n    import ring_notebook.torch.a",
    ],
)
def test_a_circle_is_noticed(last: str) -> None:
    sources = {
        "ring_notebook.torch": "from ring_notebook.torch.a import thing",
        "ring_notebook.torch.a": "from ring_notebook.torch import b",
        "ring_notebook.torch.b": "from ring_notebook.torch.c import other",
        "ring_notebook.torch.c": "import os",
    }
    TopologicalSorter(graph(sources)).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources | {"ring_notebook.torch.c": last})).prepare()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("ring_notebook/notebook/run/run.py", "from ring_notebook.core import world"),
        ("ring_notebook/notebook/run/run.py", "import ring_notebook.engine.runner"),
        ("ring_notebook/engine/runner.py", "from ring_notebook.notebook.run.run import Run"),
        ("ring_notebook/core/world.py", "def f():\n    import torch"),
        ("ring_notebook/core/world.py", "from ring_notebook import torch"),
        ("ring_notebook/core/world.py", "from ring_notebook.api import basics"),
        ("ring_notebook/api/basics.py", "from ring_notebook.torch.tensors import buffer_of"),
        ("ring_notebook/api/basics.py", "import torch"),
        ("ring_notebook/engine/runner.py", "from ring_notebook.api import basics"),
        ("ring_notebook/engine/runner.py", "import ring_notebook.torch"),
        ("ring_notebook/launch/cli.py", "from ring_notebook.core import world"),
        ("ring_notebook/launch/launchers/site_launchers.py", "from ring_notebook.launch.job import Job"),
        ("ring_notebook/protocol/records.py", "from ring_notebook.core.buffers import Buffer"),
        ("ring_notebook/text/words.py", "from ring_notebook.analysis import job_failure"),
        ("ring_notebook/launch/run_function.py", "import mpi4py"),
        ("ring_notebook/notebook/panel/panel.py", "from ring_notebook.notebook.run.run import Run"),
        ("ring_notebook/notebook/style.py", "from ring_notebook.notebook.panel import panel"),
        ("ring_notebook/torch/collectives/allreduce.py", "from ring_notebook.torch.optimizer.wrapper import x"),
        ("ring_notebook/engine/runner.py", "import torch"),
        ("ring_notebook/notebook/run/run.py", "import torch"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, line: str) -> None:
    assert violations(path, line)


@pytest.mark.parametrize("room", ["core", "api", "engine", "notebook"])
def test_a_room_that_serves_all_frameworks_names_none(room: str) -> None:
    """A face for another framework is a folder and an entry in frameworks/: no line here knows one by name."""
    naming = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in (PACKAGE / room).rglob("*.py")
        if (found := {name for name in NAMES if re.search(rf"\b{name}", path.read_text(), re.IGNORECASE)})
    }
    assert naming == {}


def test_every_room_is_known() -> None:
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in FILES} - {".", "frameworks"}  # ground
    assert rooms == set(MAY_IMPORT) - {"ground"}


def test_no_two_files_share_a_name() -> None:
    """A name says what a file does, so two files of one name would do the same."""
    names = Counter(path.stem for path in FILES if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []
