"""Training that survives failures: commit now and then, resume from the last commit (Horovod: ``elastic``)."""

from ring_notebook.api.elastic_training import State, run
from ring_notebook.torch.elastic.torch_state import ElasticSampler, TorchState

__all__ = ["ElasticSampler", "State", "TorchState", "run"]
