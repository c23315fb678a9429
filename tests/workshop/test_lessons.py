"""The lessons of the workshop show what they say, and their checks help: each test is called after its lesson."""

from __future__ import annotations

import pytest

from workshop.conftest import Workshop

pytestmark = pytest.mark.slow


def test_01_quickstart(workshop: Workshop) -> None:
    right = "linear, optimizer, loader = ring.prepare(linear, optimizer, loader)"
    measured, said = workshop(
        (right, "linear, optimizer = ring.prepare(linear, optimizer)", "each rank has all 90 batches"),
        (right, "linear, loader = ring.prepare(linear, loader)", "this optimizer averages no gradients"),
    )
    assert measured["test accuracy here"] > 0.96
    assert "the gradients of the ranks are never averaged" in said


def test_02_under_the_hood(workshop: Workshop) -> None:
    workshop(
        ("outgoing = (me - step) % n", "outgoing = me", "What did the rank before pass on"),
        ("incoming = (me - step - 1) % n", "incoming = me", "Where does what is received go"),
    )


def test_03_data_parallel(workshop: Workshop) -> None:
    _, said = workshop(
        ("ring.Average", "ring.Sum", "Is it a sum?"),
        ("allreduce_(", "allreduce(", "with an underscore, works in place"),
    )
    assert "the ranks may start from different weights: before this line add" in said


def test_04_scaling(workshop: Workshop) -> None:
    measured, said = workshop(
        ("compute / n", "compute", "4 hosts need 0.25 s"),
        ("2 * (n - 1) / n * nbytes", "(n - 1) / n * nbytes", "100 bytes at 100 bytes/s take 2"),
        ("2 * (n - 1) * latency", "latency", "4 hosts send 6 messages"),
    )
    assert "4 ranks: predicted" in said
    for kind in ("weak", "strong"):
        assert measured[f"{kind}, efficiency on 1"] == 1
        assert 0 < measured[f"{kind}, efficiency on 4"] < 1
    if measured["cores or GPUs"] <= 2:  # with room for what other processes take from the run on one rank
        assert "they take turns on 2 cores" in said


def test_05_timeline(workshop: Workshop) -> None:
    both = "handles = [begin(gradient) for gradient in gradients]\n    compute()"
    workshop(
        (both, "\n    ".join(reversed(both.split("\n    "))), "fewer than two allreduces are under way"),
        ("for handle in handles]", "for handle in handles[:1]]", "Return the sum of each gradient"),
    )


def test_06_large_batches(workshop: Workshop) -> None:
    workshop(
        ("1 + (scale - 1) * min(1, t / warmup)", "scale * min(1, t / warmup)", "The first step has another rate"),
        ("min(1, t / warmup)", "t / warmup", "After the warm-up"),
    )


def test_07_batch_size(workshop: Workshop) -> None:
    measured, _ = workshop(
        ("(small - large) / (1 / b - 1 / big)", "small - large", "small - large is tr Σ times"),
        ("large - trace / big", "large", "what is left of `large` without the noise"),
    )
    assert measured["steps with batch 4 / with batch 512"] > 3


def test_08_sharp_and_flat_minima(workshop: Workshop) -> None:
    workshop(
        ("ring.allreduce(hv)", "hv", "average over ranks"),
        ("ring.allreduce(hv)", "ring.allreduce(hv, op=ring.Sum)", "a sum, where a mean is wanted?"),
        ("hv / hv.norm()", "hv", "divide it by its norm"),
    )


def test_09_pipeline_and_model_parallel(workshop: Workshop) -> None:
    measured, said = workshop(
        ("min(m, p - s)", "m", "stage 0 keeps 8 micro-batches at once; 4 are enough"),
        ("min(m, p - s)", "2", "stage 0 keeps 2 micro-batches at once"),
        ('("F", i + ahead)', '("F", i)', "should do each of F0..F7 and B0..B7 once"),
    )
    assert measured["loss of the last step, naive"] == measured["loss of the last step, 1F1B"]
    assert "Right: 22 slots, of which 6 are idle on each stage: 27%" in said


def test_10_tensor_and_hybrid_parallel(workshop: Workshop) -> None:
    measured, said = workshop(
        ("dist.all_reduce(y)", "y", "what adds them up?"),
        ("W2[:, mine]", "W2[mine]", "the shapes do not fit"),
        ("W2[:, mine]", "W2[:, :share]", "Do both matrices use the same hidden values?"),
    )
    assert said.count("holds 32,768 of 131,072 weights; its gradient agrees") == 4
    assert all(milliseconds > 0 for milliseconds in measured.values())


def test_11_reading_data(workshop: Workshop) -> None:
    measured, _ = workshop(
        ("random.Random(epoch)", "random.Random(rank)", "Do the ranks shuffle alike?"),
        ("random.Random(epoch)", "random.Random(0)", "What differs between passes"),
        ("len(files) - len(files) % size", "len(files)", "fails in its last allreduce"),
    )
    waits = [measured[f"{way}, wait in a pass, s"] for way in ("all", "share", "workers", "packed")]
    assert waits == sorted(waits, reverse=True)


def test_12_parameter_server_or_ring(workshop: Workshop) -> None:
    _, said = workshop(
        ("link.exchange(chunks[to], to, come, source)", "link.exchange(own, to, come, source)", "the sum is wrong"),
        ("own += come", "own += own", "the sum is wrong"),
    )
    assert "each rank sent 1.67 times the gradient, 2(N-1)/N is 1.67" in said


def test_13_when_ranks_fail(workshop: Workshop) -> None:
    _, said = workshop(
        ("op=ring.Min", "op=ring.Max", "a rank has left the loop"),
        (
            "int(ring.allreduce(torch.tensor(len(batches)), op=ring.Min))",
            "len(batches)",
            "a rank has left the loop",
        ),
        ("int(ring.allreduce(torch.tensor(len(batches)), op=ring.Min))", "3", "3 steps, of 5 that are possible"),
    )
    assert "40 steps were made; weights and momentum are equal" in said
    assert "80 steps were made; weights and momentum are equal" in said
    assert "of 2 ends at step 30" in said  # the elastic job of three


def test_14_from_notebook_to_batch_job(workshop: Workshop) -> None:
    _, said = workshop(
        ("model, optimizer, loader, every", "model, loader, every", "What else changes from step to step"),
        ("saved.step()  #", "pass  #", "What tells the checkpoint that a step was made?"),
        ("saved.epochs(3)", "range(3)", "Which epochs are left after a resume?"),
    )
    assert said.count("test accuracy after 176 steps") == 4  # without a break, resumed, two ranks of the script
    assert "#SBATCH --nodes=2" in said


def test_15_steering(workshop: Workshop) -> None:
    _, said = workshop(
        ("ring.step()", "pass", "Where do all ranks pass a point together?"),
        ("high=0.5", "high=0.2", "the knob takes numbers from 0.001 to 0.2"),
        ('"rate", 0.01', '"speed", 0.01', "there is no knob 'rate'"),
    )
    assert "there is no knob 'learning_rate'; there are lr, weight_decay" in said


def test_16_keras(workshop: Workshop) -> None:
    measured, said = workshop(
        ("op=ring.Average", "op=ring.Sum", "Is it a sum?"),
        ("logs[name] = float", "float", "Is the result put back into it?"),
    )
    compared = {name: value for name, value in measured.items() if "and numpy differ" in name}
    assert len(compared) + said.count("is not installed here") == 2


def test_17_slow_links(workshop: Workshop) -> None:
    measured, said = workshop(
        ("common - own", "own - common", "Which sign has the difference?"),
        ("ring.allreduce(difference)", "difference", "Who has averaged?"),
        ("average + beta * momentum", "momentum", "Where is Nesterov's look ahead?"),
    )
    losses = {name: value for name, value in measured.items() if name.startswith("test loss")}
    assert max(losses, key=losses.__getitem__) == "test loss, outer momentum of 0.9"  # of ten rounds
    assert "The weights of the ranks differ" not in said


@pytest.mark.timeout(1200)
def test_18_fine_tuning(workshop: Workshop) -> None:
    measured, said = workshop(
        ("layer.requires_grad_(False)", "layer", "Which of its weights need gradients?"),
        ("torch.nn.init.zeros_(self.up.weight)", "self.up.weight", "Which of the two matrices should be zero?"),
        (" * self.scale", "", "scaled product"),
    )
    assert measured["texts"] == 2
    assert "trainable params: 4,096" in said


def test_19_laboratory(workshop: Workshop) -> None:
    measured, said = workshop(
        ("[: len(rates) // 2]", "[: len(rates) - 1]", "How many rates does each turn keep?"),
        ("2 * steps", "steps", "gets more time"),
        ("key=losses.get)", "key=losses.get, reverse=True)", "Which half"),
    )
    assert "cause: asleep" in said
    assert 0.05 < measured["best rate"] < 5
