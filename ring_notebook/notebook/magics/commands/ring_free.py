"""`%ring free`: what holds the memory of the ranks, and what can be freed."""

from ring_notebook.notebook.line_command import command
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.table import Listing
from ring_notebook.text.words import plural, size_text

_MOST = 12
"""Rows of a rank; the others are summed up."""


@command("cluster")
def free(session: Session) -> Listing:
    """Free the memory that a failed cell left used, and list which variables hold the rest.

    Frames of the failed cell go, so `%ring debug` has nothing to show; GPUs get cached memory back. Tensors of no
    variable are those of libraries, or of objects that nothing names.
    """
    found = session.require().free()
    rows = []
    for rank, one in enumerate(found):
        held = one.get("held", [])
        shown = [[str(rank), name or "(no variable)", device, size_text(size)] for name, device, size in held[:_MOST]]
        more = held[_MOST:]
        rows += shown
        if more:
            rows.append([str(rank), f"{plural(len(more), 'other')}", "", size_text(sum(size for *_, size in more))])
    freed = [f"rank {rank}: {size_text(one['freed'] + one['cached'])}" for rank, one in enumerate(found) if one]
    return Listing(["rank", "variable", "device", "memory"], rows, f"freed: {', '.join(freed)}")
