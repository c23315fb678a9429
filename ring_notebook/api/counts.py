"""What operations a rank has carried out and what it has sent for them: numbers that hold where times vary."""

from __future__ import annotations

from dataclasses import dataclass

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set


@dataclass(frozen=True, slots=True)
class Counts:
    """What one rank has done in the operations of a process set; later less earlier is what came in between."""

    operations: int
    """Carried out for all ranks together: those that match by order, and what came of names (several in one sum)."""
    gates: int
    """Passed barriers among the ranks of this host."""
    messages: int
    """Sent to other hosts by this rank: agreements and small tensors by the first rank of a host, the rest by all."""
    bytes: int
    """Of these messages."""

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.operations - earlier.operations,
            self.gates - earlier.gates,
            self.messages - earlier.messages,
            self.bytes - earlier.bytes,
        )


def counts(process_set: ProcessSet = global_process_set) -> Counts:
    """What this rank has done in operations of ``process_set`` since that began: with `init`, or with the cell's run.

    Takes part in nothing, so that a rank may call it alone. The ranks' numbers of messages and bytes add up to the
    traffic between hosts; there is none on one host. Aborts and departures are announced in messages that count not.
    """
    check_process_set(process_set)
    communicator = process_set.communicator
    in_order, by_name = communicator.counts(), communicator.named_counts()
    return Counts(
        in_order["operations"] + by_name["operations"],
        in_order["gates"] + by_name["gates"],
        sum(messages for messages, _ in in_order["sent"]) + by_name["messages"],
        sum(nbytes for _, nbytes in in_order["sent"]) + by_name["bytes"],
    )
