"""What engines, the controller and the kernel tell each other about ports and registration, beyond ipyparallel."""

FORMATION = "ring_formation"
"""The number of the formation that an engine was started for, in the metadata of its request. In a kernel's request to
forget an engine: the least formation whose engine may take its number."""

REPLACED = "RingEngineReplaced"
"""The name of the error for an engine of an earlier formation: another engine has its number."""

PORTS_USED_UP = "The controller's pools of ports are used up"
"""Begins a line in the controller's log."""


def used_up(number: int) -> str:
    """The line of a controller whose options give it ``number`` ports, too few of which are free."""
    return (
        f"{PORTS_USED_UP}: {number} ports in IPController's options ports, engine_ports and client_ports, some of "
        "which may be in use. It also listens on others, which a firewall may close; a cluster needs 15 of its own"
    )


def port_warning(log: str) -> str:
    """That line, from the ``log`` of a controller; empty where there is none."""
    return next((line[line.index(PORTS_USED_UP) :] for line in log.splitlines() if PORTS_USED_UP in line), "")
