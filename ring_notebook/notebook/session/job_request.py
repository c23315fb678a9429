"""What a user asks of a batch system: the options, and the request that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ring_notebook.errors import ClusterError
from ring_notebook.launch.batch_commands import BatchError
from ring_notebook.launch.job_script import BatchRequest, batch_request
from ring_notebook.text.line_options import Option, count, count_or_zero


@dataclass(frozen=True)
class JobOptions:
    """The options of any job."""

    nodes: Annotated[int | None, Option("-N N", "hosts of the job", count)] = None
    gpus: Annotated[int | None, Option("--gpus N", "GPUs on each host; by default a rank for each", count_or_zero)] = (
        None
    )
    time: Annotated[str, Option("--time 2:00:00", "time limit of the job")] = ""
    queue: Annotated[str, Option("--queue QUEUE", "queue, partition or QOS")] = ""
    account: Annotated[str, Option("--account ACCOUNT", "account or project that pays")] = ""


def request_of(site: str, nodes: int | None = None, **asked: Any) -> BatchRequest:
    """A job of ``site`` on ``nodes`` hosts, as `batch_request`. Raises ClusterError for an invalid one."""
    try:
        return batch_request(site, hosts=nodes, **asked)
    except BatchError as error:
        raise ClusterError(str(error)) from None
