"""Counts of a rank's operations, messages and bytes: unlike times, they are reproducible."""

from __future__ import annotations

from dataclasses import dataclass

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one rank in the operations of a process set. Subtract earlier counts to get those in between."""

    operations: int
    """Operations carried out, matched by order or by name; several that match by name may be fused into one."""
    gates: int
    """Barriers among the ranks of this host."""
    messages: int
    """Messages of this rank to other hosts: headers and small tensors come from the first rank of a host only."""
    bytes: int
    """Bytes of these messages."""

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.operations - earlier.operations,
            self.gates - earlier.gates,
            self.messages - earlier.messages,
            self.bytes - earlier.bytes,
        )


def counts(process_set: ProcessSet = global_process_set) -> Counts:
    """Counts of this rank in operations of ``process_set``, since `init`, or since the cell's run began.

    It is no collective: a single rank may call it. The sum of all ranks' messages and bytes is the traffic between
    hosts; it is 0 on one host. Messages that announce aborts and departures are not counted.
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
