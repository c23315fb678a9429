"""Elastic training with TensorFlow (Horovod: ``horovod.tensorflow.elastic``)."""

from ring_notebook.api.elastic_training import State, run
from ring_notebook.api.object_state import ObjectState
from ring_notebook.tensorflow.elastic.tensorflow_state import TensorFlowKerasState, TensorFlowState

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
