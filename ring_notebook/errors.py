"""Every exception that this package raises."""

from __future__ import annotations


class RingError(RuntimeError):
    """Base of every error that Ring Notebook raises itself."""


class HorovodInternalError(RingError):
    """A collective failed, and a new generation may succeed (Horovod: ``HorovodInternalError``).

    ``elastic.run`` catches it, restores the last commit and resumes.
    """


class CollectiveError(HorovodInternalError):
    """A collective failed on this rank."""


class CollectiveMismatch(CollectiveError):
    """Ranks called different collectives, or one collective with different shapes, dtypes, roots or operations.

    Raised on every rank of the group; the message has a table of who called what. The group stays usable, unless the
    ranks waited for one another in different calls: that ends the generation.
    """


class CollectiveAborted(CollectiveError):
    """Another rank raised, was interrupted, left or died; the generation of this communicator has ended."""


class CollectiveTimeout(CollectiveError):
    """A collective did not complete before its deadline; the message names the ranks that are missing."""


class OutOfRingMemoryError(RingError, MemoryError):
    """Ring memory could not be reserved: the machine or its memory limit is full."""


class NotInitializedError(RingError, ValueError):
    """A collective was called before ``init()`` (Horovod raises ValueError here)."""


class HostsUpdatedInterrupt(RingError):
    """The set of hosts has changed (Horovod: ``HostsUpdatedInterrupt``)."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(
            "the set of hosts has changed; a training function under @elastic.run goes on with the new ranks by itself"
        )
        self.skip_sync = skip_sync


class CoreMissingError(RingError, ImportError):
    """The native core is not compiled for this Python."""


class MPIMissingError(RingError, ImportError):
    """No MPI library can be loaded."""


class ClusterError(RingError):
    """The cluster could not be started, reached or stopped."""


class RunFailed(RingError):
    """A run failed and the original exception type is not importable in the kernel."""


class RunTimeout(RingError, TimeoutError):
    """A run took longer than its ``--timeout`` and was stopped."""


class KnobError(RingError, ValueError):
    """A knob does not exist, or does not take a value; nothing was changed."""


class DriftError(RingError):
    """Parameters or optimizer state that should be equal on all ranks are not."""


class ReplayDiffers(RingError):
    """A replay of a run of logical ranks made gradients that differ from that run's."""


class CellSyntaxError(RingError):
    """The source of a cell does not compile; nothing was sent to the ranks.

    Not a SyntaxError, which IPython always shows with all frames of this package.
    """
