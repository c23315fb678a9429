"""The options of ringrun and horovodrun as tables: what each becomes, and the errors and notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs import executable
from ring_notebook.launch.cli import main
from ring_notebook.launch.hosts_of_job import find_allocation
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.launch.ringrun_options import config_words, elastic_rules, environment, hosts_of, notes, parse
from ring_notebook.launch.supervisor.growth import Elastic

# All options of horovodrun 0.28 with a value for each, in the order of its launch.py.
HOROVODRUN = """
-np 2 --disable-cache --start-timeout 5 --network-interfaces eth0 --network-interface eth1 --output-filename out
--verbose -p 2222 -i key --fusion-threshold-mb 2 --cycle-time-ms 1.5 --cache-capacity 8 --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --autotune --no-autotune
--autotune-log-file log --autotune-warmup-samples 1 --autotune-steps-per-sample 1 --autotune-bayes-opt-max-samples 1
--autotune-gaussian-process-noise 0.1 --min-np 1 --min-num-proc 1 --max-np 4 --max-num-proc 4 --slots-per-host 2
--elastic-timeout 9 --reset-limit 1 --blacklist-cooldown-range 1 2 --timeline-filename t.json --timeline-mark-cycles
--no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds 3
--stall-check-shutdown-time-seconds 4 --mpi-threads-disable --no-mpi-threads-disable --mpi-args= --tcp --binding-args=
--num-nccl-streams 1 --thread-affinity 1 --gloo-timeout-seconds 1 --log-level INFO --log-with-timestamp
--log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp
-H a,b:3 --gloo --mpi --jsrun
"""
# Its other options, which end the command, or exclude one of those, or are second names.
OTHERS = """
-v --version -cb --check-build --num-proc --ssh-port --ssh-identity-file --config-file --hosts -hostfile --hostfile
--host-discovery-script
"""


def test_all_options_of_horovodrun_are_taken() -> None:
    parser, options = parse([*HOROVODRUN.split(), "train.py", "--gloo"])
    assert options.command == ["train.py", "--gloo"]
    assert set(OTHERS.split()) <= {name for action in parser._actions for name in action.option_strings}
    assert hosts_of(options) == [Host("a", 2), Host("b", 3)]
    assert (options.output_dir, options.times, options.no_stall_check, options.min_np) == ("out", True, False, 1)
    assert environment(options) == {
        "RING_WARMUP": "1",
        "RING_FUSION_THRESHOLD": str(2 << 20),
        "RING_INTERFACE": "eth0",
        "RING_REMOTE_SHELL": "ssh -T -o BatchMode=yes -o ConnectTimeout=20 -p 2222 -i key",
        "RING_STALL_WARNING": "3.0",
        "RING_START_TIMEOUT": "5.0",
        "RING_TIMELINE": "t.json",
        "RING_TIMEOUT": "4.0",
        "RING_TRANSPORT": "tcp",
    }
    said = notes(options, here=False)
    assert "--cycle-time-ms has no effect: there are no cycles" in said
    assert "ranks connect through one network interface of each host: eth0 is taken" in said
    assert len(said) == len(set(said)) == 29  # 28 of no effect, and the interface
    assert elastic_rules(options, 2) == Elastic(1, 4, "", 2, (1.0, 2.0), 9.0)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("--no-stall-check", {"RING_STALL_WARNING": "0"}),
        ("--cpus-per-rank 3", {"OMP_NUM_THREADS": "3"}),
        ("", {}),
    ],
)
def test_variables_of_options(words: str, variables: dict[str, str]) -> None:
    assert environment(parse([*words.split(), "p"])[1]) == {"RING_WARMUP": "1", **variables}


def test_options_between_hosts_say_where_there_are_none() -> None:
    said = notes(parse(["--tcp", "-p", "2", "p"])[1], here=True)
    assert said == [f"{flag} has no effect: all ranks are on this host" for flag in ("-p", "--tcp")]


def test_a_configuration_file(tmp_path: Path) -> None:
    """In the form of horovodrun's; options on the command line have the last word."""
    path = tmp_path / "options.yaml"
    path.write_text(
        "timeline:\n  filename: a.json\nparams:\n  fusion_threshold_mb: 2\nstall_check:\n  enabled: false\n"
    )
    _, options = parse(["--config-file", str(path), "--timeline-filename", "b.json", "-np", "2", "p"])
    assert environment(options) == {
        "RING_WARMUP": "1",
        "RING_TIMELINE": "b.json",
        "RING_FUSION_THRESHOLD": str(2 << 20),
        "RING_STALL_WARNING": "0",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"controller": "gloo"}, ["--gloo"]),
        (
            {"params": {"hierarchical_allreduce": False, "cycle_time_ms": 2}},
            ["--no-hierarchical-allreduce", "--cycle-time-ms", "2"],
        ),
        ({"autotune": {"enabled": True, "log_file": "l"}}, ["--autotune", "--autotune-log-file", "l"]),
        (
            {"stall_check": {"enabled": True, "warning_time_seconds": 9}},
            ["--stall-check", "--stall-check-warning-time-seconds", "9"],
        ),
        (
            {"library_options": {"mpi_threads_disable": True, "num_nccl_streams": 2}},
            ["--mpi-threads-disable", "--num-nccl-streams", "2"],
        ),
        ({"logging": {"level": "INFO", "with_timestamp": False}}, ["--log-level", "INFO", "--log-without-timestamp"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_sections_of_a_configuration_file(given: dict[str, object], words: list[str]) -> None:
    assert config_words(given) == words
    parse([*words, "p"])


def test_a_script_names_the_hosts(tmp_path: Path) -> None:
    script = executable(tmp_path / "hosts.sh", "#!/bin/sh\necho a:4\necho b\n")
    words = ["--host-discovery-script", str(script), "--slots-per-host", "2", "p"]
    assert hosts_of(parse(words)[1]) == [Host("a", 4), Host("b", 2)]
    assert elastic_rules(parse(words)[1], 6) == Elastic(1, 0, str(script), 2)
    assert hosts_of(parse(["-H", "a:2", *words])[1]) == [Host("a", 2)], "what the job begins with"
    script.write_text("#!/bin/sh\necho no queue >&2; exit 3\n")
    with pytest.raises(ValueError, match="failed: exit code 3 no queue"):
        hosts_of(parse(words)[1])


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("", Elastic()),
        ("--elastic", Elastic(1)),
        ("--min-np 3", Elastic(3)),
        ("--elastic --reset-limit 0 --max-np 8", Elastic()),
        ("--max-np 8", Elastic(1, 8)),
        ("--min-np 2 --max-np 4 --blacklist-cooldown-range 2 30", Elastic(2, 4, cooldown=(2.0, 30.0))),
    ],
)
def test_what_makes_a_job_elastic(words: str, rules: Elastic) -> None:
    assert elastic_rules(parse([*words.split(), "p"])[1], 4) == rules


def test_a_limit_below_the_ranks_that_a_job_begins_with() -> None:
    with pytest.raises(ValueError, match="--max-np must be at least the 4 ranks that the job begins with, got 3"):
        elastic_rules(parse(["--max-np", "3", "p"])[1], 4)


def test_slots_follow_the_cores_of_each_rank() -> None:
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "16(x3)", "SLURM_JOB_CPUS_PER_NODE": "16(x2),2"}
    allocation = find_allocation(env, cpus_per_rank=4)
    assert allocation is not None
    assert [host.slots for host in allocation.hosts] == [4, 4, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-np 2", "nothing to run; for example: ringrun -np 4 train.py"),
        ("-np 2 --", "nothing to run"),
        ("python x.py", "the number of ranks is missing: give -np N"),
        ("-np 2 -H a:x python x.py", "cannot read host 'a:x'"),
        ("-np 3 -H a:1,b:1 python x.py", "3 ranks need 3 slots, the hosts have 2 slots;"),
        ("-np 2 -H localhost:1 python x.py", "2 ranks need 2 slots, the hosts have 1 slot;"),
        ("-np 2 -H localhost:1 --elastic python x.py", "2 ranks need 2 slots"),
        ("-np 0 python x.py", "-np must be at least 1, got 0"),
        ("-np -1 python x.py", "-np must be at least 1, got -1"),
        ("-np 2 --hostfile /no/such python x.py", "No such file"),
        ("-np 2 --gpus python x.py", "unrecognized arguments: --gpus"),
        ("--scale 1,x python x.py", "expected numbers of ranks separated by commas, such as 1,2,4, got '1,x'"),
        ("--scale 1,2 -np 2 python x.py", "--scale sets the ranks of each run"),
        ("--scale 1,2 --elastic python x.py", "which stay the same; leave out --elastic"),
        ("--scale 1,3 -H a:1,b:1 python x.py", "3 ranks need 3 slots, the hosts have 2 slots;"),
        ("--scale 1,2 --link fast python x.py", "expected the rate of a host's network such as 25Gbit"),
        ("--scale 1,2 --repeat 0 python x.py", "--repeat: expected an integer of at least 1, got '0'"),
        ("--min-np 0 -np 2 x.py", "--min-np must be between 1 and the 2 ranks of the job, got 0"),
        ("--min-np 3 -np 2 x.py", "--min-np must be between 1 and the 2 ranks of the job, got 3"),
        ("--elastic --reset-limit -1 -np 2 x.py", "--reset-limit must be at least 0, got -1"),
        ("--elastic --mpi-args=-v -np 2 true", "an elastic job starts without mpiexec"),
        ("-np 100000 true", "100000 ranks are more than this host can start: at most "),
        ("-np 2 --predict 8 python x.py", "--predict is an option of --scale"),
        ("--doctor -H a:2 --ppn 2", "--doctor starts no program, and takes no --ppn; it takes hosts (-H, --hostfile)"),
        ("-cb -np 2", "--doctor starts no program, and takes no -np"),
        ("--json -np 2 p", "--json is an option of --doctor"),
        ("--min-np 2 -np 2 -H a,b --mpi-args=-v true", "an elastic job starts without mpiexec; leave out the options"),
        ("-np 2 --timelin x", "unrecognized arguments: --timelin; did you mean: --timeline-filename"),
        ("-np 2 --elastci true", "unrecognized arguments: --elastci; did you mean: --elastic"),
        ("--ppn 2 -np 4 true", "-np 4 with --ppn 2 needs several hosts; name them with -H"),
        ("--ppn 2 -np 5 -H a,b true", "5 ranks need 5 slots, the hosts have 4 slots"),
        (
            "-np 2 -H no.such.host,localhost --network-interface nope0 true",
            "error: this host has no network interface 'nope0'; .* takes one of .*lo",
        ),
        ("--ppn 0 true", "--ppn must be at least 1, got 0"),
        ("-np 2 --logical 0 true", "--logical must be at least 1, got 0"),
        ("-np 9 --logical 8 true", "--logical must be at least -np, got 8 and 9"),
        ("-np 2 --max-np 9 --logical 8 true", "--logical must be at least --max-np, got 8 and 9"),
        ("-np 2 --stall-check-warning-time-seconds -1 true", "--stall-check-warning-time-seconds must be at least 0"),
        ("-np 2 -H a,b -p 22 --mpi-args=-v true", "-p and -i: the mpiexec connects to the hosts itself"),
        ("-np 2 --config-file /no/such true", "--config-file /no/such: .* No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is taken and ignored."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    (message,) = [said for said in capsys.readouterr().err.splitlines() if "error:" in said]
    assert all(part in message for part in words.split(".*"))
