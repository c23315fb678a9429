"""What an engine that registers and the controller say to each other, beyond ipyparallel's own messages."""

FORMATION = "ring_formation"
"""The number of the formation that an engine was started for, in the metadata of its request. In a kernel's request to
forget an engine: the least one that may take its number from now on."""

REPLACED = "RingEngineReplaced"
"""The name of the error that an engine gets which was started for an earlier formation: another has its number."""
