"""An elastic training that waits for WANTED ranks, and then trains; at its end each rank says what it has seen.

``python growing.py WANTED [VICTIMS [agent]]``: in the 7th step the ranks of VICTIMS ("0,1") kill themselves, or the
agent of their host, once. The others go back to the last commit and wait until they are WANTED again.
"""

import json
import os
import signal
import sys
import time

import torch

import ring_notebook.torch as hvd

wanted = int(sys.argv[1])
victims = [int(rank) for rank in sys.argv[2].split(",")] if sys.argv[2:] else []
torch.set_num_threads(1)
hvd.init()
job_rank = int(os.environ["RING_RANK"])
joined = "RING_STARTED_AGAIN" in os.environ
torch.manual_seed(os.getpid() if joined else 0)  # who joins has to take over the model
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
sampler = hvd.elastic.ElasticSampler(data, seed=3)
starts: list[tuple[int, int]] = []


@hvd.elastic.run
def train(state):
    starts.append((hvd.size(), state.batch))
    while hvd.size() < wanted:
        state.check_host_updates()
        time.sleep(0.01)
    for index in sampler:
        if state.batch == 7 and job_rank in victims and not state.died:
            if sys.argv[3:] == ["agent"]:
                from hosts.killed import kill

                kill("agent", os.getpid())
                time.sleep(100)  # until this rank ends with its agent
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(data[index]) - 1.0).square().sum().backward()
        optimizer.step()
        state.seen = state.seen + hvd.allgather_object(index)
        state.batch += 1
        sampler.record_batch(0, 1)
        if state.batch % 3 == 0:
            state.commit()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, seen=[], died=False)
state.register_reset_callbacks([lambda: setattr(state, "died", state.batch > 0)])
train(state)
hvd.check(model, optimizer)
report = {
    "job_rank": job_rank,
    "joined": joined,
    "rank": hvd.rank(),
    "local": [hvd.local_rank(), hvd.local_size()],
    "starts": starts,
    "seen": state.seen,
    "weight": model.weight.tolist(),
}
os.write(1, (json.dumps(report) + "\n").encode())
