"""A real JupyterLab in a real browser."""
