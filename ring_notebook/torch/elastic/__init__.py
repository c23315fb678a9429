"""Training that survives failures: commit now and then, resume from the last commit (Horovod: ``elastic``)."""

from ring_notebook.api.elastic.loop import run
from ring_notebook.api.elastic.state import State
from ring_notebook.torch.elastic.elastic_sampler import ElasticSampler
from ring_notebook.torch.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "State", "TorchState", "run"]
