"""What ranks and their children write to descriptors 1 and 2 is shown in the cell, as it is in a plain cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import waiting
from notebook.kernel import Notebook, with_cluster
from ring_notebook.engine import capture
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel import labelled_lines
from ring_notebook.notebook.run import late_lines

CELL = """
import ctypes, multiprocessing, os, subprocess, sys
print("python"); os.write(1, b"descriptor\\n"); libc = ctypes.CDLL(None); libc.puts(b"C")
print("between"); subprocess.run(["echo", "program"]); os.system("echo shell; echo error >&2")
child = multiprocessing.get_context("fork").Process(target=print, args=("fork",)); child.start(); child.join()
print("again", file=sys.stderr); os.write(2, b"last error\\n"); _ = libc.printf(b"no end of line")
"""


def test_what_is_written_below_python_is_in_order(cluster: Cluster) -> None:
    run = cluster.run(CELL).wait()
    lines = labelled_lines.Lines().take(run.view.output, last=True)
    everybody = list(range(run.log.size))
    assert [(sorted(line.ranks), line.text) for line in lines if line.stream == "stdout"] == [
        (everybody, text)
        for text in ("python", "descriptor", "C", "between", "program", "shell", "fork", "no end of line")
    ]
    assert [(sorted(line.ranks), line.text) for line in lines if line.stream == "stderr"] == [
        (everybody, text) for text in ("error", "again", "last error")
    ]


def test_more_than_a_pipe_holds_stops_nobody(cluster: Cluster) -> None:
    """A rank that holds the interpreter would never read it."""
    written = "for number in range(2000): os.write(1, b'%063d\\n' % number)"
    run = cluster.run(f"import ctypes, os\n{written}\nctypes.PyDLL(None).usleep(300_000)\n{written}").wait()
    texts = ["".join(one.text for one in run.log.output() if one.rank == rank) for rank in range(run.log.size)]
    assert texts == ["".join(f"{number:063}\n" for number in range(2000)) * 2] * run.log.size


def test_a_program_that_empties_its_output(cluster: Cluster) -> None:
    run = cluster.run(
        "import os\nos.write(1, b'x' * 99)\nprint('between')\n_ = os.system('echo y > /dev/stdout')"
    ).wait()
    assert any(one.text.endswith("y\n") for one in run.view.output)


def test_a_cell_that_closes_its_descriptors(cluster: Cluster) -> None:
    source = "import os\nkept = os.dup(1), os.dup(2)\nos.close(1); os.close(2)\nprint('python')\n"
    run = cluster.run(source + "os.dup2(kept[0], 1); os.dup2(kept[1], 2)\n_ = os.write(1, b'again\\n')").wait()
    lines = labelled_lines.Lines().take(run.view.output, last=True)
    assert [(line.text, line.stream) for line in lines] == [("python", "stdout"), ("again", "stdout")]


def test_the_last_words_of_a_rank(cluster: Cluster) -> None:
    """What a C library says before it ends the process."""
    words = "os.write(2, b'free(): invalid pointer\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    source = f"import os, signal\nif ring.rank() == 0:\n    {words}\nelse:\n    ring.barrier()"
    with pytest.raises(ClusterError, match=r"(?s)rank 0 .*SIGKILL.*\nfree\(\): invalid pointer"):
        cluster.run(source).wait()
    cluster.heal()
    assert "free()" not in str(cluster.run("pass").wait().view.output)


LATE_CELL = """
import os, pathlib, threading, time
rank = ring.rank()
folder = pathlib.Path({folder!r})
def write():
    while not (folder / "go").exists():
        time.sleep(0.01)
    print("thread"); os.write(1, b"descriptor\\n"); os.system("echo program >&2")
    (folder / f"done {{rank}}").touch()
threading.Thread(target=write).start()
# The next cell begins slowly, as on a busy machine.
from ring_notebook.engine import late_output
begins = late_output.cell_begins
def begins_slowly():
    late_output.cell_begins = begins
    time.sleep(0.3)
    return begins()
late_output.cell_begins = begins_slowly
"""


def test_what_is_written_between_two_cells_is_shown_in_the_next_as_late(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.run(LATE_CELL.format(folder=str(tmp_path))).wait()
    (tmp_path / "go").touch()
    waiting.until(lambda: len([*tmp_path.glob("done *")]) == run.log.size)
    run = cluster.run("print('now')").wait()
    lines = labelled_lines.Lines().take(run.view.output, last=True)
    shown = {stream: "\n".join(line.text for line in lines if line.stream == stream) for stream in ("stdout", "stderr")}
    assert shown == {
        "stdout": f"{capture.LATE}\nthread\ndescriptor\nnow",
        "stderr": f"{capture.LATE}\nprogram",
    }
    assert capture.LATE not in str(cluster.run("pass").wait().view.output)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    started = with_cluster(tmp_path_factory.mktemp("notebook"))
    yield started
    started.close()


SPEAKS = """%%ringtrain --name {name} {options}
import os, pathlib, threading, time
folder = pathlib.Path({folder!r})
def speak(name):
    for turn in range(2):
        while not (folder / f"{{name}} {{turn}}").exists():
            time.sleep(0.01)
        print(name, turn)
        if turn == 0: os.system(f"echo program {{name}}")
threading.Thread(target=speak, args=({name!r},)).start()
"""


@pytest.mark.slow
def test_a_notebook_shows_what_comes_late_below_the_cell_of_its_thread(notebook: Notebook, tmp_path: Path) -> None:
    """Also while a later cell runs."""
    first, second = (
        notebook.begin(SPEAKS.format(name=name, options=options, folder=str(tmp_path)))
        for name, options in (("first", ""), ("second", "--background"))
    )
    notebook.printed_below(second, "ok · second")
    (tmp_path / "second 0").touch()
    shown = notebook.printed_below(second, "program second\n")
    assert f"{late_lines.TITLE.format('second')}\n[0-1] second 0\n" in shown
    (tmp_path / "first 0").touch()
    assert f"{late_lines.TITLE.format('first')}\n[0-1] first 0\n" in notebook.printed_below(first, "first 0\n")
    end = f"pathlib.Path({str(tmp_path)!r}, 'end')"
    busy = notebook.begin(f"%%ringtrain\nimport pathlib, time\nwhile not {end}.exists(): time.sleep(.1)")
    (tmp_path / "first 1").touch()
    assert "[0-1] first 1\n" in notebook.printed_below(first, "first 1\n")
    (tmp_path / "end").touch()
    assert "first" not in notebook.printed_below(busy, "ok · ")
    (tmp_path / "second 1").touch()
    notebook.printed_below(second, "second 1\n")
    names = "print([one.name for one in threading.enumerate() if one.name == 'ring-late-lines'])"
    waiting.until(lambda: notebook.text(f"import threading; {names}") == "[]\n")
