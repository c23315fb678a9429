"""Clusters: started, attached, healed, ended."""
