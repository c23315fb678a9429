"""Horovod's elastic PyTorch example: a state with a sampler, commits, and a learning rate that follows the size."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--fail-in-epoch", type=int, default=1)


@hvd.elastic.run
def train(state):
    global starts
    starts += 1
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020 - it goes on where it was
        state.model.train()
        batch_offset = state.batch
        for batch_idx, (data, target) in enumerate(train_loader):
            state.batch = batch_offset + batch_idx
            if state.epoch == args.fail_in_epoch and starts == 1 and state.batch == 8 and hvd.rank() == 0:
                raise hvd.HorovodInternalError("a failure of the network")
            if args.batches_per_commit > 0 and state.batch % args.batches_per_commit == 0:
                state.commit()
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(data), target).backward()
            state.optimizer.step()
            state.train_sampler.record_batch(batch_idx, args.batch_size)
        state.batch = 0
        state.train_sampler.set_epoch(state.epoch)
        state.commit()


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


if __name__ == "__main__":
    args = parser.parse_args()
    starts = 0
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train_dataset = torch.utils.data.TensorDataset(images, labels)
    train_sampler = hvd.elastic.ElasticSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, train_sampler=train_sampler, epoch=1, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    with torch.no_grad():
        accuracy = model(images).argmax(1).eq(labels).float().mean().item()
