"""The first ``horovod`` on the path of programs under ``ringrun --horovod``: importing it turns the import hook on.

This folder is in their PYTHONPATH. The program then gets the module that the hook makes.
"""

from importlib import import_module

from ring_notebook.horovod.as_horovod import as_horovod

as_horovod()
import_module("horovod")
