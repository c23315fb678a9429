"""What kernel and engines know of numpy as a framework; it is loaded through an entry point."""

from __future__ import annotations

from collections.abc import Iterator

from ring_notebook.frameworks import CellCalls, Framework, Hint

__all__ = ["NUMPY"]


def hints(cell: CellCalls) -> Iterator[Hint]:
    descent = next((call for call in cell.calls if "descent" in call.whole), None)
    if "differentiate" in cell.names and descent and "allreduce" not in cell.names:
        yield Hint(descent.line, "After this line add `gradient = ring.allreduce(gradient)`")


NUMPY = Framework(
    name="numpy",
    face="numpy_face",
    modules=("numpy",),
    gpu_word="cupy",
    gpu_setup="\nimport cupy\n",
    hints=hints,
)
