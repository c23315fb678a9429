"""What kernel and engines know of numpy as a framework; it is loaded through an entry point."""

from __future__ import annotations

from ring_notebook.frameworks import Advice, Framework, Vocabulary

__all__ = ["NUMPY"]

NUMPY = Framework(
    name="numpy",
    face="numpy_face",
    modules=("numpy",),
    gpu_word="cupy",
    gpu_setup="\nimport cupy\n",
    vocabulary=Vocabulary(
        gradients=frozenset({"differentiate"}), averaging=frozenset({"allreduce"}), optimizers="descent"
    ),
    advice=Advice(average="After this line add `gradient = ring.allreduce(gradient)`"),
)
