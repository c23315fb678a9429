"""What ranks display reaches the notebook: figures, tables, values, live states; all of it in a real kernel."""

from __future__ import annotations

from typing import Any

import pytest

from harness.waiting import until
from notebook.kernel import Notebook

PNG = "image/png"


def displayed(outputs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """What stands below the report: the ranks and the data of each display."""
    data = [output["data"] for output in outputs if output["output_type"] == "display_data"][1:]
    return [(label["text/plain"], shown) for label, shown in zip(data[::2], data[1::2], strict=True)]


def report(outputs: list[dict[str, Any]]) -> str:
    return str(outputs[0]["data"]["text/plain"])


def test_figures_come_with_show_and_at_the_end(notebook: Notebook) -> None:
    drawn = notebook.run(
        "%%ringtrain\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\n"
        "plt.figure(); plt.plot([ring.rank(), 2]);"
    )
    assert [(ranks, PNG in data) for ranks, data in displayed(drawn)] == [("[0-1]", True), ("[0]", True), ("[1]", True)]
    assert "Line2D" not in report(drawn)
    again = notebook.run("%%ringtrain\nprint(plt.get_fignums())")
    assert "[0-1] []" in report(again)


def test_a_figure_that_was_drawn_before_the_cell_failed_is_shown(notebook: Notebook) -> None:
    outputs = notebook.run("%%ringtrain\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nif ring.rank() == 1: 1 / 0")
    assert PNG in displayed(outputs)[0][1]
    assert [output["ename"] for output in outputs if output["output_type"] == "error"] == ["ZeroDivisionError"]


def test_what_ranks_log_as_pictures_is_in_the_report_and_in_files(notebook: Notebook) -> None:
    outputs = notebook.run(
        "%%ringtrain --name pictures --out run\nimport numpy as np, matplotlib.pyplot as plt\n"
        "for step in range(3):\n"
        "    ring.log(loss=1.0, histogram=np.arange(9.0), text={'<b>': f'step {step} of {ring.rank()}'})\n"
        "figure, axes = plt.subplots(figsize=(2, 1))\nring.log(figure=figure, image=np.eye(4))\n"
    )
    shown = outputs[-1]["data"]["text/html"]
    assert [ranks for ranks, _ in displayed(outputs)] == [], "a figure that is logged is not displayed again"
    for said in ("[0-1]</span> image · step 2", "[0-1]</span> figure · step 2", "[0]</span> &lt;b&gt; · step 2"):
        assert said in shown
    assert ("<pre>step 2 of 1</pre>" in shown, "<pre>step 1 of 1</pre>" in shown) == (True, False)
    assert "step 2 of 1" in outputs[-1]["data"]["text/plain"]
    assert notebook.text("print(len(run.media), len(run.displays))") == "16 0\n"
    assert (
        notebook.text("print(len([*run.to_media().iterdir()]), run.to_media() == run.directory / 'media')")
        == "16 True\n"
    )


def test_the_last_value_looks_as_in_a_notebook(notebook: Notebook) -> None:
    outputs = notebook.run("%%ringtrain\nimport pandas\npandas.DataFrame({'loss': [1.5]})")
    ((ranks, data),) = displayed(outputs)
    assert ranks == "[0-1]"
    assert "<td>1.5</td>" in data["text/html"]
    assert "[0-1] 'value'" in report(notebook.run("%%ringtrain\n'value'"))
    assert "value" not in report(notebook.run("%%ringtrain --name quiet\n'value';"))


def test_logging_set_up_in_one_cell_is_seen_in_the_next(notebook: Notebook) -> None:
    notebook.run("%%ringtrain\nimport logging\nlogging.basicConfig(level=logging.INFO)")
    assert "[0-1] INFO:root:second" in report(notebook.run("%%ringtrain\nlogging.info('second')"))


def test_updates_and_clear_output(notebook: Notebook) -> None:
    outputs = notebook.run(
        "%%ringtrain --name updates\nfrom IPython.display import HTML, clear_output, display\n"
        "print('taken back')\nfor step in range(5):\n"
        "    clear_output(wait=True)\n    print('frame', step)\n"
        "    shown = display(HTML(f'{step} of {ring.rank()}'), display_id=True)\n"
        "shown.update(HTML(f'last of {ring.rank()}'))"
    )
    assert [(ranks, data["text/html"]) for ranks, data in displayed(outputs)] == [
        ("[0]", "last of 0"),
        ("[1]", "last of 1"),
    ]
    assert "frame 4" in report(outputs)
    assert "frame 3" not in report(outputs)
    assert "taken back" not in report(outputs)
    assert "taken back" in notebook.text(
        "import os\nfrom pathlib import Path\n"
        "print(max(Path(os.environ['RING_RUNS_DIR']).glob('*/journal.jsonl')).read_text())"
    )


@pytest.mark.slow
def test_in_the_background_displays_are_part_of_the_report(notebook: Notebook) -> None:
    cell = "%%ringtrain --background --out shown\nimport time\nfrom IPython.display import HTML, display\n"
    notebook.run(cell + "time.sleep(0.3)\nfor i in range(30): display(HTML(f'<b>number {i}</b>'))")
    place, _ = notebook.document.cells[-1].outputs
    notebook.run("shown.wait()")
    until(lambda: notebook.run("pass") or "number 29" in place["data"].get("text/html", ""))
    assert "[0-1]</span><div><b>number 29</b>" in place["data"]["text/html"]
    assert "20 earlier displays: see Run.displays" in place["data"]["text/html"]
    assert notebook.text("print(len(shown.displays), shown.displays[-1].data['text/html'])").startswith("60 <b>number")
    again = notebook.run("%ring attach")
    assert any("number 29" in str(output) for output in again)
