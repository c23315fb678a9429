"""The notebooks about large batches, models, data and clusters show what they say, and their checks help."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from workshop.conftest import Workshop

pytestmark = pytest.mark.slow


def test_08_sharp_and_flat_minima(workshop: Workshop) -> None:
    workshop(
        "08_sharp_and_flat_minima",
        [
            ("ring.allreduce(hv)", "hv", "average over ranks"),
            ("ring.allreduce(hv)", "ring.allreduce(hv, op=ring.Sum)", "a sum, where a mean is wanted?"),
            ("hv / hv.norm()", "hv", "divide it by its norm"),
        ],
    )


def test_09_pipeline_and_model_parallel(workshop: Workshop) -> None:
    measured, said = workshop(
        "09_pipeline_and_model_parallel",
        [
            ("min(m, p - s)", "m", "stage 0 keeps 8 micro-batches at once; 4 are enough"),
            ("min(m, p - s)", "2", "stage 0 keeps 2 micro-batches at once"),
            ('("F", i + ahead)', '("F", i)', "should do each of F0..F7 and B0..B7 once"),
        ],
    )
    assert measured["loss of the last step, naive"] == measured["loss of the last step, 1F1B"]
    assert "Right: 22 slots, of which 6 are idle on each stage: 27%" in said


def test_10_tensor_and_hybrid_parallel(workshop: Workshop) -> None:
    measured, said = workshop(
        "10_tensor_and_hybrid_parallel",
        [
            ("dist.all_reduce(y)", "y", "what adds them up?"),
            ("W2[:, mine]", "W2[mine]", "the shapes do not fit"),
            ("W2[:, mine]", "W2[:, :share]", "Do both matrices use the same hidden values?"),
        ],
    )
    assert said.count("holds 32,768 of 131,072 weights; its gradient agrees") == 4
    assert all(milliseconds > 0 for milliseconds in measured.values())


def test_11_reading_data(workshop: Workshop) -> None:
    measured, _ = workshop(
        "11_reading_data",
        [
            ("random.Random(epoch)", "random.Random(rank)", "Do the ranks shuffle alike?"),
            ("random.Random(epoch)", "random.Random(0)", "What differs between passes"),
            ("len(files) - len(files) % size", "len(files)", "would wait for a partner"),
        ],
    )
    waits = [measured[f"{way}, wait in a pass, s"] for way in ("all", "share", "workers", "packed")]
    assert waits == sorted(waits, reverse=True)


def test_12_parameter_server_or_ring(workshop: Workshop) -> None:
    _, said = workshop(
        "12_parameter_server_or_ring",
        [
            ("link.exchange(chunks[to], to, come, source)", "link.exchange(own, to, come, source)", "the sum is wrong"),
            ("own += come", "own += own", "the sum is wrong"),
        ],
    )
    assert "each rank sent 1.67 times the gradient, 2(N-1)/N is 1.67" in said


def test_13_when_ranks_fail(workshop: Workshop) -> None:
    _, said = workshop(
        "13_when_ranks_fail",
        [
            ("op=ring.Min", "op=ring.Max", "a rank has left the loop"),
            (
                "int(ring.allreduce(torch.tensor(len(batches)), op=ring.Min))",
                "len(batches)",
                "a rank has left the loop",
            ),
            ("int(ring.allreduce(torch.tensor(len(batches)), op=ring.Min))", "3", "3 steps, of 5 that are possible"),
        ],
    )
    assert "40 steps were made; weights and momentum are equal" in said
    assert "80 steps were made; weights and momentum are equal" in said
    assert "of 2 ends at step 30" in said  # the elastic job of three


def test_14_from_notebook_to_batch_job(workshop: Workshop) -> None:
    _, said = workshop(
        "14_from_notebook_to_batch_job",
        [
            ("model, optimizer, loader, every", "model, loader, every", "What else changes from step to step"),
            ("saved.step()  #", "pass  #", "What tells the checkpoint that a step was made?"),
            ("saved.epochs(3)", "range(3)", "Which epochs are left after a resume?"),
        ],
    )
    assert said.count("test accuracy after 176 steps") == 4  # without a break, resumed, two ranks of the script
    assert "#SBATCH --nodes=2" in said


def test_17_slow_links(workshop: Workshop) -> None:
    measured, said = workshop(
        "17_slow_links",
        [
            ("common - own", "own - common", "Which sign has the difference?"),
            ("ring.allreduce(difference)", "difference", "Who has averaged?"),
            ("average + beta * momentum", "momentum", "Where is Nesterov's look ahead?"),
        ],
    )
    losses = {name: value for name, value in measured.items() if name.startswith("test loss")}
    assert max(losses, key=losses.__getitem__) == "test loss, outer momentum of 0.9"  # of ten rounds
    assert "The weights of the ranks differ" not in said


def test_15_steering(workshop: Workshop) -> None:
    _, said = workshop(
        "15_steering",
        [
            ("ring.step()", "pass", "Where do all ranks pass a point together?"),
            ("high=0.5", "high=0.2", "the knob takes numbers from 0.001 to 0.2"),
            ('"rate", 0.01', '"speed", 0.01', "there is no knob 'rate'"),
        ],
    )
    assert "there is no knob 'learning_rate'; there are lr, weight_decay" in said


@pytest.mark.timeout(1200)
def test_18_fine_tuning(workshop: Workshop) -> None:
    if find_spec("trl") is None:
        pytest.skip("needs trl: make .libraries/installed, PYTHONPATH=$(echo $PWD/.libraries/venv/lib/*/site-packages)")
    measured, said = workshop(
        "18_fine_tuning",
        [
            ("layer.requires_grad_(False)", "layer", "Which of its weights need gradients?"),
            ("torch.nn.init.zeros_(self.up.weight)", "self.up.weight", "Which of the two matrices should be zero?"),
            (" * self.scale", "", "scaled product"),
        ],
    )
    assert measured["texts"] == 2
    assert "trainable params: 4,096" in said


def test_19_laboratory(workshop: Workshop) -> None:
    measured, said = workshop(
        "19_laboratory",
        [
            ("[: len(rates) // 2]", "[: len(rates) - 1]", "How many rates does each turn keep?"),
            ("2 * steps", "steps", "gets more time"),
            ("key=losses.get)", "key=losses.get, reverse=True)", "Which half"),
        ],
    )
    assert "cause: asleep" in said
    assert 0.05 < measured["best rate"] < 5
