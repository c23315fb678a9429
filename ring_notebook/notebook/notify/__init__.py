"""Notices about long runs, for a user who looks elsewhere: in JupyterLab, and through a callable."""
