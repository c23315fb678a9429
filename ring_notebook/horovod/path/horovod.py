"""What programs that ``ringrun --horovod`` starts find first as ``horovod``: it turns the import hook on.

This folder is in their PYTHONPATH. The module that importers get is the one that the hook makes.
"""

from importlib import import_module

from ring_notebook.horovod.as_horovod import as_horovod

__all__ = []  # imported for its effect

as_horovod()
import_module("horovod")
