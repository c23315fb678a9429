"""PMI-1 as a table, what does not speak it, and the names that MPICH gives to its shared memory."""

from __future__ import annotations

import json
import os

import pytest

from ring_notebook.launch.connections.pmi import PmiServer, lines, process_mapping, shared_memory_prefixes


def answers(server: PmiServer, rank: int, *lines: str) -> dict[int, list[str]]:
    replies = server.receive(rank, "".join(f"{line}\n" for line in lines).encode())
    return {to: reply.decode().splitlines() for to, reply in replies.items()}


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"),
        ("cmd=get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0"),
        ("cmd=get_appnum", "cmd=appnum appnum=0 rc=0"),
        ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=job rc=0"),
        ("cmd=get_universe_size", "cmd=universe_size size=2 rc=0"),
        ("cmd=get kvsname=job key=PMI_process_mapping", "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"),
        ("cmd=get kvsname=job key=absent", "cmd=get_result rc=-1 msg=key_not_found"),
        ("cmd=put kvsname=job key=k value=a=b c", "cmd=put_result rc=0 msg=success"),
        ("cmd=finalize", "cmd=finalize_ack rc=0"),
        ("cmd=publish_name service=s port=p", "cmd=publish_name_result rc=-1 msg=not_supported"),
        ("nonsense", "cmd=unknown_result rc=-1 msg=not_supported"),
        ("", "cmd=unknown_result rc=-1 msg=not_supported"),
    ],
)
def test_replies(line: str, reply: str) -> None:
    assert answers(PmiServer("job", [0, 0]), 1, line) == {1: [reply]}


def test_a_value_reaches_another_rank_as_it_is() -> None:
    server = PmiServer("job", [0, 0])
    answers(server, 0, "cmd=put kvsname=job key=k value=a=b  c")
    assert answers(server, 1, "cmd=get kvsname=job key=k") == {1: ["cmd=get_result rc=0 msg=success value=a=b  c"]}


def test_a_barrier_ends_when_all_have_entered_it() -> None:
    server = PmiServer("job", [0, 0, 0])
    assert answers(server, 2, "cmd=barrier_in") == {}
    assert answers(server, 0, "cmd=barrier_in") == {}
    assert answers(server, 1, "cmd=barrier_in") == {rank: ["cmd=barrier_out rc=0"] for rank in range(3)}
    assert answers(server, 1, "cmd=barrier_in") == {}, "the next one"


def test_lines_that_come_in_pieces_and_together() -> None:
    server = PmiServer("job", [0])
    assert server.receive(0, b"cmd=get_app") == {}
    assert server.receive(0, b"num\ncmd=get_appnum\n") == {0: b"cmd=appnum appnum=0 rc=0\n" * 2}


def test_spawning_is_refused_as_a_whole() -> None:
    lines = ["mcmd=spawn", "nprocs=2", "execname=/bin/true", "cmd=init", "endcmd", "cmd=get_appnum"]
    assert answers(PmiServer("job", [0]), 0, *lines) == {
        0: ["cmd=spawn_result rc=-1 status=1", "cmd=appnum appnum=0 rc=0"]
    }


@pytest.mark.parametrize("data", [b"x" * 70_000, b"x" * 70_000 + b"\n"])
def test_a_line_without_end_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="rank 0: a PMI line of more than 65536 bytes"):
        PmiServer("job", [0]).receive(0, data)


def test_any_bytes_are_answered_or_refused() -> None:
    server = PmiServer("job", [0, 0])
    for seed in range(300):
        junk = os.urandom(seed).replace(b"barrier", b"") + b"\n"
        assert set(server.receive(0, junk)) <= {0, 1}


def test_the_names_of_mpichs_shared_memory() -> None:
    """That a job's files have these names is proven where they are removed."""
    assert shared_memory_prefixes("ring1795") == ("mpich_shm_3282c189_", "mpich_vci_3282c189_"), "seen with MPICH 5.0.2"


@pytest.mark.parametrize(
    ("places", "mapping"),
    [
        ([0], "(vector,(0,1,1))"),
        ([0, 0, 0], "(vector,(0,1,3))"),
        ([0, 0, 1, 1], "(vector,(0,2,2))"),
        ([0, 0, 1], "(vector,(0,1,2),(1,1,1))"),
        ([0, 1, 2, 2, 3, 3], "(vector,(0,2,1),(2,2,2))"),
        ([0, 1, 0], "(vector,(0,2,1),(0,1,1))"),
        ([host for host in range(200) for _ in range(1 + host % 2)], ""),
    ],
    ids=["one", "one host", "two hosts", "unequal", "pairs", "a host twice", "longer than a line"],
)
def test_which_ranks_share_a_host(places: list[int], mapping: str) -> None:
    assert process_mapping(places) == mapping


def request(value: str, members: str = "null") -> str:
    return f'cmd=ring_gather value={{"formation": 0, "step": 0, "members": {members}, "value": {value}}}'


def test_ranks_gather_beside_mpi() -> None:
    """What they are answered otherwise stands in tests/unit/rank/test_gathering.py."""
    server = PmiServer("job", [0, 1], elastic=True)
    assert answers(server, 1, request('["a b", "c=d"]')) == {}
    replies = answers(server, 0, "cmd=get_appnum", request("null"))
    assert replies[0][0] == "cmd=appnum appnum=0 rc=0"
    told = [json.loads(reply[-1].removeprefix("cmd=ring_gathered value=")) for reply in replies.values()]
    assert [one["values"] for one in told] == [[None, ["a b", "c=d"]]] * 2
    assert [one["elastic"] for one in told] == [True] * 2
    assert answers(server, 0, request("1")) == {}
    why = b"rank 1 exited (exit code 3) before all ranks had called init()"
    (reply,) = lines(server.gathering.exited(1, "exit code 3")).values()
    assert why in reply
    assert reply.endswith(b"\n")


@pytest.mark.parametrize("value", ["", "{", "[" * 50_000, '1, "step": {}'])
def test_what_is_gathered_has_to_be_json(value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the supervisor hangs up, whatever it is
        PmiServer("job", [0]).receive(0, f"{request(value)}\n".encode())
