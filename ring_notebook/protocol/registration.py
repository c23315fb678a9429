"""What a registering engine and the controller tell each other, beyond ipyparallel's own messages."""

FORMATION = "ring_formation"
"""The number of the formation that an engine was started for, in the metadata of its request. In a kernel's request to
forget an engine: the least formation whose engine may take its number."""

REPLACED = "RingEngineReplaced"
"""The name of the error for an engine of an earlier formation: another engine has its number."""
