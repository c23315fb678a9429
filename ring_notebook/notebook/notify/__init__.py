"""Tells a person who looks elsewhere how a long run goes: in JupyterLab, and by a callable."""
