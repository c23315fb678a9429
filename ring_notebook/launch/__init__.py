"""Command line and batch systems: everything that starts ranks outside a notebook."""
